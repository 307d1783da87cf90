"""The Django application that carries the migrations; it has no models."""

from __future__ import annotations

from django.apps import AppConfig


class RetrysafeConfig(AppConfig):
    """Known to Django as `retrysafe`."""

    name = "retrysafe.contrib.django"
    label = "retrysafe"
    verbose_name = "retrysafe"
