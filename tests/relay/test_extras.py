"""A target without its library says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import retrysafe

SOURCE = Path(retrysafe.__file__).parents[1]


@pytest.mark.parametrize(
    ("target", "library"),
    [
        ("webhooks", "httpx"),
        ("rabbitmq", "aio_pika"),
        ("nats", "nats"),
        ("kafka", "confluent_kafka"),
    ],
)
def test_a_missing_library_says_which_extra_has_it(target, library):
    """In an environment that has retrysafe alone, by the name of the extra."""
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import retrysafe.relay.targets.{target}"
    )
    ended = subprocess.run(
        # -S -E: nothing of the environment that the tests run in.
        [sys.executable, "-S", "-E", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last == (
        f"ModuleNotFoundError: retrysafe.relay.targets.{target} needs {library}: "
        f"install retrysafe with its extra {target}, "
        f"from a clone with pip install '/path/to/clone[{target}]'"
    )
