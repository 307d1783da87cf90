"""The pages for projects without the middleware.

Include them at the root: `path("", include("retrysafe.contrib.django.urls"))`.
"""

from __future__ import annotations

from django.urls import path

from retrysafe.contrib.django.configuration import current
from retrysafe.contrib.django.pages import page

_protection = current().protection

app_name = "retrysafe"
urlpatterns = [
    path(_protection.policy_path.removeprefix("/"), page, name="policy"),
    path(f"{_protection.status_path.removeprefix('/')}<path:key>", page, name="status"),
]
