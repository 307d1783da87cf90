"""The reference application without any protection, which the cases should notice."""

from __future__ import annotations

from typing import Any

from tests.http_cases.apps.raw_asgi import perform
from tests.http_cases.configuration import Mount


def make(_: Mount) -> Any:
    """The application itself."""
    return perform
