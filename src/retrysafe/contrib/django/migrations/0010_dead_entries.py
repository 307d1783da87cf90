"""Migration 10 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Indexes the dead entries of the outbox."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0009_views")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(10)]
