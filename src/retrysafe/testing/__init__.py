"""Tools for tests, shipped for authors of applications and of stores.

`Kit` is for applications; the fixture `retrysafe_kit` of `retrysafe.testing.plugin` makes it.
`StoreSuite` is the definition of a store, `ManualClock` a clock that tests move by hand, and
`FaultyStore` a store that fails where a test tells it to. Needs the extra `testing`.
"""

try:
    import pytest
except ImportError as missing:  # pragma: no cover
    raise ImportError(
        "retrysafe.testing needs pytest: install retrysafe with its extra testing, from a clone "
        "with pip install '/path/to/clone[testing]'"
    ) from missing

# Before the suite is imported: a failing assertion in it then shows the values that it compared.
pytest.register_assert_rewrite("retrysafe.testing.suite")

from retrysafe.testing.clock import ManualClock  # noqa: E402  The rewrite must be registered first.
from retrysafe.testing.faults import (  # noqa: E402
    Fault,
    FaultyStore,
    LoggedCall,
    Moment,
    PortCall,
    store_unavailable,
)
from retrysafe.testing.kit import (  # noqa: E402
    Kit,
    assert_ran,
    assert_replayed,
    stored_response,
)
from retrysafe.testing.suite import StoreSuite  # noqa: E402
from retrysafe.testing.watched import AttemptKilled  # noqa: E402

__all__ = [
    "AttemptKilled",
    "Fault",
    "FaultyStore",
    "Kit",
    "LoggedCall",
    "ManualClock",
    "Moment",
    "PortCall",
    "StoreSuite",
    "assert_ran",
    "assert_replayed",
    "store_unavailable",
    "stored_response",
]
