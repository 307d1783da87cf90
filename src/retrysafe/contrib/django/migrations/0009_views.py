"""Migration 9 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Shows status, method, path and duration in the views."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0008_operators")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(9)]
