"""What every framework's OpenAPI document shows of the shop's rules."""

from __future__ import annotations

import pytest

from retrysafe.stores import MemoryStore
from tests.contrib.conftest import made
from tests.contrib.shops import Till, parameter_of


@pytest.fixture(params=["fastapi", "litestar"])
def paths(request, tmp_path):
    app, _ = made(request.param, Till(tmp_path / "shop.db"), MemoryStore())
    document = app.openapi() if request.param == "fastapi" else app.openapi_schema.to_schema()
    return document["paths"]


def test_the_document_shows_the_key(paths):
    """As a header, required or not; where there is no rule, nothing is shown."""
    charge = parameter_of(paths["/charges"]["post"])
    assert (charge["in"], charge["required"]) == ("header", True)
    assert charge["schema"] == {"type": "string", "minLength": 1}
    assert parameter_of(paths["/notes"]["post"])["required"] is False
    for operation in (
        paths["/plain"]["post"],
        paths["/open"]["post"],
        paths["/v1/refunds/{number}"]["get"],
    ):
        assert "Idempotency-Key" not in str(operation)
        assert "409" not in operation["responses"]
    assert not [path for path in paths if path.startswith("/idempotency")]


def test_the_document_shows_the_retention(paths):
    """How long a key is remembered, and that retries are safe for that long."""
    charge, refund = paths["/charges"]["post"], paths["/v1/refunds/{number}"]["post"]
    assert "Send an `Idempotency-Key`" in charge["description"]
    for operation, days in ((charge, "1 day"), (refund, "7 days")):
        assert f"for {days} after" in operation["description"]
        assert f"Remembered for {days}." in parameter_of(operation)["description"]
    assert "(/idempotency-policy)" in refund["description"]
