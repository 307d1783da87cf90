"""Each framework behind a real server: the application opens and closes what it uses."""

from __future__ import annotations

import httpx
import pytest

from retrysafe import Idempotency
from retrysafe.http import bearer_token
from retrysafe.http.callers import caller_of_credential
from retrysafe.http.request import Request
from tests.contrib.conftest import FRAMEWORKS, is_replay, made, problem
from tests.contrib.serving import served
from tests.contrib.shops import Till


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_retry_over_a_real_connection(framework, tmp_path):
    """First response, replay and mismatch over sockets; once the server has ended, the outcome is
    in the file and the object is closed."""
    till = Till(tmp_path / "shop.db")
    till.open_for_business()
    url = f"sqlite:///{till.path}"
    app, retrysafe = made(framework, till, url)
    headers = {"Idempotency-Key": '"k-1"', "Authorization": "Bearer alice"}
    with served(app) as base, httpx.Client(base_url=base, headers=headers) as client:
        first, second = (client.post("/charges", json={"amount": 7}) for _ in range(2))
        assert (first.status_code, first.content) == (201, second.content)
        assert (is_replay(first), is_replay(second)) == (False, True)
        assert problem(client.post("/charges", json={"amount": 8})) == "key-reused"
        assert client.post("/sync-orders").status_code == 422
        placed = client.post("/sync-orders", headers={"Idempotency-Key": "k-2"})
        assert placed.status_code == 201
        assert client.get("/idempotency-policy").status_code == 200
    assert till.runs == ["charge", "order"]
    assert retrysafe.calls._is_closed
    token = bearer_token(Request("POST", "/", b"", [(b"authorization", b"Bearer alice")]))
    caller = caller_of_credential(token, None)
    with Idempotency(url, caller=caller) as idem:
        assert len(idem.read("k-1").outcomes) == 1
        assert len(idem.read("k-2").outcomes) == 1
