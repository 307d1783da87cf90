"""The pages for projects without the middleware.

Include them at the root: `path("", include("retrysafe.contrib.django.urls"))`.
"""

from __future__ import annotations

from django.urls import path

from retrysafe.contrib.django.configuration import current
from retrysafe.contrib.django.pages import page

_protection = current().protection

app_name = "retrysafe"
_status_path = _protection.pages.status_path.removeprefix("/")
_policy_path = _protection.pages.policy_path.removeprefix("/")
urlpatterns = [
    *([path(_policy_path, page, name="policy")] if _protection.pages.has_policy else []),
    # Without a key there is nothing to tell, which is better said here than by a view.
    path(_status_path, page, name="status"),
    path(f"{_status_path}<path:key>", page, name="status"),
]
