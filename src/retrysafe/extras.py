"""What is said where a library is missing that an extra of retrysafe brings."""

from __future__ import annotations


def missing_extra(module: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The refusal to import one of retrysafe's modules without the library that it is for."""
    return ModuleNotFoundError(
        f"{module} needs {error.name}: install retrysafe with its extra {extra}, from a clone with "
        f"pip install '/path/to/clone[{extra}]'",
        name=error.name,
    )
