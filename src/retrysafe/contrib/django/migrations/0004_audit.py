"""Migration 4 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Makes the view of the audit."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0003_arguments")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(4)]
