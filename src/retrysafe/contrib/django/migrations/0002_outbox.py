"""Migration 2 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Makes the outbox."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0001_initial")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(2)]
