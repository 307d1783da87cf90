"""A bar chart as SVG, written by hand: the benchmarks need no plotting library."""

from __future__ import annotations

from html import escape
from typing import Any

_BAR, _GAP, _LEFT, _WIDTH = 22, 10, 520, 420
_COLOURS = {True: "#2e7d32", False: "#c62828"}


def bar_chart(title: str, rows: list[dict[str, Any]]) -> str:
    """One bar per row for its ratio, with a mark at its target."""
    largest = max([1.0, *(max(row["ratio"], row["target"] or 0.0) for row in rows)])
    height = 50 + len(rows) * (_BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="24" font-size="16">'
        f"{escape(title)}</text>",
    ]
    for number, row in enumerate(rows):
        top = 42 + number * (_BAR + _GAP)
        width = row["ratio"] / largest * _WIDTH
        colour = "#607d8b" if row["target"] is None else _COLOURS[row["is_met"]]
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(row["name"])}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 16}">{row["ratio"]:.2f}</text>'
        )
        if row["target"] is not None:
            place = _LEFT + row["target"] / largest * _WIDTH
            parts.append(
                f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{top - 3}" y2="{top + _BAR + 3}" '
                'stroke="black" stroke-width="2"/>'
            )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
