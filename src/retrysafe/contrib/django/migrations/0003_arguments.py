"""Migration 3 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Makes the table of arguments."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0002_outbox")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(3)]
