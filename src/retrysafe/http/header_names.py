"""Names of headers: what one can be, and which of them hold credentials."""

from __future__ import annotations

import re
from typing import Final

HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# What headers of such names hold lets anybody in who reads it.
_CREDENTIAL_NAME: Final = re.compile(
    rb"authorization|cookie|token|secret|password|passwd|jwt|credential|bearer|key$|auth$"
    rb"|(?:api|access)[-_.]?key|session(?:[-_.]?id)?$|\bsid$"
)


def holds_credential(name: bytes) -> bool:
    """Whether a header of this lower-case name holds what proves who calls."""
    return _CREDENTIAL_NAME.search(name) is not None
