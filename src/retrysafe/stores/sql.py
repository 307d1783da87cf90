"""Loads SQL from files: blocks that start with `-- name: some_name` and explain themselves."""

from __future__ import annotations

import re
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def load_blocks(package: str, file_name: str) -> dict[str, str]:
    """The named statements of one file; raises `ValueError` when a name occurs twice."""
    text = files(package).joinpath(file_name).read_text(encoding="utf-8")
    pieces = _NAME.split(text)
    blocks: dict[str, str] = {}
    for name, block in zip(pieces[1::2], pieces[2::2], strict=True):
        if name in blocks:
            raise ValueError(f"{file_name} has two blocks named {name}")
        lines = [line for line in block.splitlines() if not line.lstrip().startswith("--")]
        blocks[name] = "\n".join(lines).strip().rstrip(";")
    return blocks


_REPEATED = re.compile(r"\{rows:(.*?)\}", re.DOTALL)


def repeated(block: str, count: int) -> str:
    """The statement for that many rows: what stands in `{rows:…}` is repeated."""
    return _REPEATED.sub(lambda match: ", ".join([match.group(1)] * count), block)
