"""The pytest plugin: `pytest_plugins = ["retrysafe.testing.plugin"]` in your `conftest.py`.

Not loaded by its mere presence: whoever does not use it pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.idempotency import Idempotency
from retrysafe.testing.fresh import Schemas, fresh_store
from retrysafe.testing.kit import Kit

MakeKit = Callable[..., Kit]


@pytest.fixture(scope="session")
def _retrysafe_schemas() -> Iterator[Schemas]:
    schemas = Schemas()
    yield schemas
    schemas.drop()


@pytest.fixture
def retrysafe_kit(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeKit]:
    """Makes test kits: `retrysafe_kit(idempotency)`, or with a fresh store as second argument.

    `"memory"`, `"sqlite"`, `sqlite:///path/to/your.db` or `postgresql://…`; without one the object
    keeps its own store. At the end of the test everything is as before.
    """
    with ExitStack() as stack:

        def make(idempotency: Idempotency | AsyncIdempotency, store: str | None = None) -> Kit:
            if store is None:
                return stack.enter_context(Kit(idempotency))
            schemas: Schemas = request.getfixturevalue("_retrysafe_schemas")
            is_async = isinstance(idempotency, AsyncIdempotency)
            made, turn = fresh_store(store, tmp_path, schemas, is_async=is_async)
            return stack.enter_context(Kit(idempotency, made, turn=turn))

        yield make
