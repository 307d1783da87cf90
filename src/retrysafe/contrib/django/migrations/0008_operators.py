"""Migration 8 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Finds keys by their claim, and keeps who released a key and why."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0007_endings")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(8)]
