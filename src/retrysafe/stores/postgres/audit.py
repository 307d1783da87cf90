"""The audit of a PostgreSQL schema as a whole: partition by partition, page by page.

Owns the order of an export. There is no index on the instant of an ending, because every ending
would pay for it; so an export reads what is kept, in short statements, and never sorts it.
"""

from __future__ import annotations

import re
from typing import Final

from retrysafe.stores.audit import AuditEntry, AuditPart
from retrysafe.stores.postgres.rows import outcome_of
from retrysafe.stores.postgres.statements import Statements

# Pages per statement; bodies that lie apart come with them.
PART_PAGES: Final = 64
# What the sweep and the migrations call a partition.
_PARTITION: Final = re.compile(r"outcomes_(default|[0-9]{8})")


async def part(
    statements: Statements, first_ms: int, past_ms: int, start: tuple[int, int]
) -> AuditPart:
    """The next pages of the audit; a day that is dropped meanwhile is passed over."""
    day, page = start
    rows = await statements.fetch("audit_tables")
    # Positions are days, not numbers of a list that changes.
    tables = sorted(
        (_day_of(name), name, pages) for name, pages in rows if _PARTITION.fullmatch(name)
    )
    total = sum(pages for _, _, pages in tables) or 1
    done = sum(pages for number, _, pages in tables if number < day)
    for number, name, pages in tables:
        if number < day or (number == day and page >= pages):
            continue
        first = page if number == day else 0
        if first >= pages:
            continue
        past = first + PART_PAGES
        found = await statements.fetch_text(
            statements.text("audit_in_pages").replace("{partition}", name),
            (f"({first},0)", f"({past},0)", first_ms, past_ms),
        )
        entries = [
            AuditEntry(bytes(row[0]), row[1], row[2], row[3], outcome_of(row[4:])) for row in found
        ]
        return AuditPart(entries, (number, past), min(1.0, (done + past) / total))
    return AuditPart([], None, 1.0)


def _day_of(name: str) -> int:
    """A number for a partition by which they are ordered; the default one comes first."""
    day = name.removeprefix("outcomes_")
    return int(day) if day.isdigit() else 0
