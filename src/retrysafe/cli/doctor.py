"""`retrysafe doctor`: what is wrong with a store's settings, before it costs somebody money."""

from __future__ import annotations

import sys

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode
from retrysafe.core.settings import environment_secret, secrets_of
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.diagnosis import Diagnosable, Finding


@options.examples(
    "retrysafe doctor --store sqlite:////var/lib/app/keys.db",
    "retrysafe doctor --store postgresql://app@db/app --json",
)
def doctor(
    context: typer.Context,
    store: options.StoreUrl = None,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Look at a store's settings, and say what would break a promise; exit 1 when something would.

    Of PostgreSQL: settings, tables, schema, partitions, pooler and clock. Of SQLite: schema, mode,
    access and file system. Of this environment: RETRYSAFE_SECRET. Changes nothing. Good at the
    start of a deployment, after migrate.
    """
    with options.opened_store(store, busy_timeout) as chosen:
        assert isinstance(chosen, Diagnosable)  # As all are that outlive their process.
        found = [*run_sync(chosen.diagnose()), *_secret_findings()]
    if options.is_json(context, as_json):
        output.write_json(
            {
                "problems": [item.text for item in found if item.is_problem],
                "notes": [item.text for item in found if not item.is_problem],
            }
        )
    else:
        lines = [_line(item) for item in found] or ["nothing to complain about"]
        sys.stdout.write("\n".join(lines) + "\n")
    if any(item.is_problem for item in found):
        raise typer.Exit(ExitCode.REFUSED)


def _secret_findings() -> list[Finding]:
    """What the secret of this environment says; raises `SecretMissing` for a short one."""
    secrets = secrets_of(environment_secret())
    if not secrets.listed:
        return [
            Finding(
                "RETRYSAFE_SECRET is not set here. An application without a secret stores "
                "fingerprints and callers as plain hashes, against which short tokens and small "
                "requests can be tried by who reads the store, and has no body or child keys",
                is_problem=False,
            )
        ]
    if len(secrets.listed) == 1 and not secrets.has_plain:
        return []
    return [
        Finding(
            "RETRYSAFE_SECRET lists several secrets: remove the old ones when the longest active "
            "window has passed since the last process without the first one ended",
            is_problem=False,
        )
    ]


def _line(finding: Finding) -> str:
    return output.safe(f"{'problem' if finding.is_problem else 'note'}: {finding.text}")
