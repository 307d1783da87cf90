"""Migration 6 of retrysafe."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from retrysafe.contrib.django.operations import ApplyMigration


class Migration(migrations.Migration):
    """Makes the table of renewals beside a user's transaction."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("retrysafe", "0005_open_tries")]
    operations: ClassVar[list[ApplyMigration]] = [ApplyMigration(6)]
