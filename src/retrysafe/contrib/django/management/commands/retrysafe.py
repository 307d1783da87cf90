"""`manage.py retrysafe keys list`: the command line of retrysafe, on the project's store."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from retrysafe.contrib.django.configuration import store_url


class Command(BaseCommand):
    """Runs a command of retrysafe on the store that the setting `RETRYSAFE` names."""

    help = "Runs a command of retrysafe on the project's store, such as: manage.py retrysafe doctor"

    def run_from_argv(self, argv: list[str]) -> None:
        """Passes everything on as it is: the options are those of retrysafe."""
        os.environ.setdefault("RETRYSAFE_STORE", store_url())
        # The command line itself, in the place of this process.
        os.execv(sys.executable, [sys.executable, "-m", "retrysafe", *argv[2:]])  # noqa: S606

    def handle(self, *args: Any, **options: Any) -> None:
        """Not by `call_command`: the command line ends its process."""
        raise CommandError("run it from a shell: manage.py retrysafe doctor")
