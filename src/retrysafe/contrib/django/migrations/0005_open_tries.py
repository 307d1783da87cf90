"""Migration 5 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Marks the tries of entries whose delivery has begun."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0004_audit")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(5)]
