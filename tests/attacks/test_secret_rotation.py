"""A rotation of the secret under load: processes with the old list and the new one side by side.

Attacked: every step of the recipe, with duplicates of the same requests on both sides at once, and
retries of what ran one step earlier. What must hold: each request runs once, every client gets the
first answer, and no honest retry is refused.
"""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from retrysafe import BodyKey, Idempotency
from retrysafe.http import Rule, WSGIIdempotencyMiddleware, bearer_token
from tests.http.driving import ask_wsgi

OLD, NEW = "the old secret, 16 or more", "the new secret, 16 or more"
RECIPE = [([OLD], [OLD, NEW]), ([OLD, NEW], [NEW, OLD]), ([NEW, OLD], [NEW])]
SHORT_RECIPE = [([OLD], [NEW, OLD]), ([NEW, OLD], [NEW])]
REQUESTS = 12
# Threads of each side; all of them send all requests.
CLIENTS = 3
DEADLINE_SECONDS = 60
RULES = [Rule(path="/charges"), Rule(path="/orders", key=BodyKey())]


class Till:
    """What was carried out, by the name of the request."""

    def __init__(self):
        self._lock = threading.Lock()
        self.runs = []

    def wsgi(self, environ, start_response):
        name = json.loads(environ["wsgi.input"].read())["name"]
        with self._lock:
            self.runs.append(name)
            number = len(self.runs)
        time.sleep(0)  # Lets the others in, between the effect and its outcome.
        start_response("201 Made", [("Content-Type", "application/json")])
        return [b'{"run": %d}' % number]


class Side:
    """A process with its own list of secrets."""

    def __init__(self, url, secret, till):
        self.idem = Idempotency(url, secret=secret, cache=False)
        self.app = WSGIIdempotencyMiddleware(till.wsgi, self.idem, caller=bearer_token, rules=RULES)

    def ask(self, name):
        """The answer to a request, which is sent again for as long as it is in flight."""
        path, _, number = name.partition(" ")
        body = json.dumps({"name": name}).encode()
        key = f'"{name}"' if path == "/charges" else None
        give_up = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < give_up:
            reply = ask_wsgi(self.app, "POST", path, key=key, body=body, caller=f"c{number}")
            if reply.status != 409:
                return reply.status, reply.body
            time.sleep(0.005)
        raise TimeoutError(name)


def stormed(sides, names):
    """Every request from every client of both sides at once; the answers by request."""
    barrier = threading.Barrier(len(sides) * CLIENTS)
    answers = {name: set() for name in names}
    lock, errors = threading.Lock(), []

    def client(side, seed):
        mine = list(names)
        random.Random(seed).shuffle(mine)
        barrier.wait(DEADLINE_SECONDS)
        try:
            for name in mine:
                answer = side.ask(name)
                with lock:
                    answers[name].add(answer)
        except Exception as error:
            errors.append(error)

    threads = [
        # Both sides send in the same order, so that they meet.
        threading.Thread(target=client, args=(side, seed), daemon=True)
        for side in sides
        for seed in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
    assert errors == []
    return answers


def rotated(url, recipe):
    """Goes through the recipe; the runs, and the answers by request."""
    till, answers, before = Till(), {}, []
    for number, lists in enumerate(recipe):
        if number and [OLD] in recipe[number - 1] and [NEW] in lists:
            before = []  # The recipe waits here until what the old one made is past its window.
        sides = [Side(url, listed, till) for listed in lists]
        try:
            names = [
                f"{path} {number}-{item}"
                for path in ("/charges", "/orders")
                for item in range(REQUESTS // 2)
            ]
            for name, found in stormed(sides, names + before).items():
                answers.setdefault(name, set()).update(found)
            before = names
        finally:
            for side in sides:
                side.idem.close()
    return till.runs, answers


@pytest.mark.parametrize("recipe", [RECIPE, SHORT_RECIPE], ids=["three deploys", "two"])
def test_each_request_runs_once_through_a_rotation(database_url, recipe):
    runs, answers = rotated(database_url, recipe)
    assert sorted(runs) == sorted(answers)
    assert len(runs) == REQUESTS * len(recipe)
    for name, found in answers.items():
        ((status, _),) = found
        assert status == 201, name


def test_without_nested_claims_requests_run_twice(tmp_path, monkeypatch):
    """The attack finds what it is made to find."""
    monkeypatch.setattr("retrysafe.http.protection.nested", lambda call, keys: call)
    runs, _ = rotated(f"sqlite:///{tmp_path / 'keys.db'}", SHORT_RECIPE)
    assert len(runs) > len(set(runs))
