"""Jinja2, set up so that nothing stored becomes markup."""

from __future__ import annotations

from typing import Any

from retrysafe import inspection
from retrysafe.extras import missing_extra

try:
    import jinja2
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "dashboard", error) from error


class Templates:
    """The templates of the package; every value is escaped."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("retrysafe.dashboard", "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters["duration"] = inspection.duration_text
        self._environment.filters["instant"] = inspection.instant_text

    def render(self, name: str, **values: Any) -> str:
        """The page."""
        return self._environment.get_template(name).render(**values)
