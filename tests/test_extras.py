"""A module without the library that it is made for says which extra has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import retrysafe

SOURCE = Path(retrysafe.__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("contrib.starlette", "starlette"),
        ("contrib.fastapi", "fastapi"),
        ("contrib.litestar", "litestar"),
        ("contrib.flask", "flask"),
        ("relay.targets.webhooks", "httpx"),
        ("relay.targets.rabbitmq", "aio_pika"),
        ("relay.targets.nats", "nats"),
        ("relay.targets.kafka", "confluent_kafka"),
    ],
)
def test_a_missing_library_says_which_extra_has_it(module, library):
    """In an environment that has retrysafe alone, by the name of the extra."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import retrysafe.{module}"
    ended = subprocess.run(
        # -S -E: nothing of the environment that the tests run in.
        [sys.executable, "-S", "-E", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    extra = module.rpartition(".")[2]
    assert ended.stderr.strip().splitlines()[-1] == (
        f"ModuleNotFoundError: retrysafe.{module} needs {library}: install retrysafe with its "
        f"extra {extra}, from a clone with pip install '/path/to/clone[{extra}]'"
    )
