"""How options of librdkafka are written in Python: with underscores for dots."""

from __future__ import annotations

from typing import Final

# Names that have underscores themselves, beside its callbacks.
_WITH_UNDERSCORES: Final = frozenset({"log_level", "ssl_ca", "ssl_certificate", "ssl_key"})


def option_name(name: str) -> str:
    """What librdkafka calls an option of Python."""
    if name in _WITH_UNDERSCORES or name.endswith("_cb"):
        return name
    return name.replace("_", ".")
