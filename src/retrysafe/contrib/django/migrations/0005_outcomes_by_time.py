"""Migration 5 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Has outcomes found by the end of their audit."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0004_audit")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(5)]
