"""Migration 7 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Stores with each key how the attempts of its life ended."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0006_renewals")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(7)]
