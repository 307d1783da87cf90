"""The project's own tests, as `manage.py test` runs them."""

from django.db import connection
from django.test import TestCase, TransactionTestCase

from retrysafe.contrib.django.configuration import current
from retrysafe.testing import Kit, assert_ran, assert_replayed
from tests.contrib.django_project.shop.models import Order

HEADERS = {"Authorization": "Bearer alice", "Idempotency-Key": '"k"'}
PATHS = ("plain", "completed", "atomic", "rest")


class Each:
    """What holds in every kind of test case; twice, so that one finds the keys of the other."""

    def post(self, path, **headers):
        self.client.raise_request_exception = False
        return self.client.post(f"/{path}", headers=HEADERS | headers)

    def look(self):
        for path in PATHS:
            with self.subTest(path):
                headers = {"Idempotency-Key": f'"{path}"'}
                first, second = (self.post(path, **headers) for _ in range(2))
                assert_ran(first)
                assert_replayed(second)
                assert first.content == second.content
                assert Order.objects.filter(item=path).count() == 1

    def test_once(self):
        self.look()

    def test_twice(self):
        self.look()

    def test_a_view_that_fails_before_its_commit_leaves_nothing(self):
        for path in ("completed", "atomic"):
            with self.subTest(path):
                headers = {"Idempotency-Key": f'"{path}"'}
                assert self.post(path, **headers, fails="1").status_code == 500
                assert not Order.objects.filter(item=path).exists()
                assert_ran(self.post(path, **headers))
                assert_replayed(self.post(path, **headers))

    async def test_async_views(self):
        if connection.settings_dict["ATOMIC_REQUESTS"]:
            return
        for is_replay in (False, True):
            response = await self.async_client.post("/on_loop", headers=HEADERS)
            assert response.status_code == 201
            assert ("Idempotent-Replayed" in response) == is_replay


class InTheTransactionOfTheTest(Each, TestCase):
    pass


class WithCommits(Each, TransactionTestCase):
    def test_the_kit(self):
        if connection.vendor == "sqlite":
            # Threads of a database in memory wait for each other's tables; see the other kit.
            crashes, at_once = ("before",), 1
        else:
            crashes, at_once = ("before", "after"), 8
        with Kit(current().idempotency) as kit:
            for path in ("completed", "atomic"):
                kit.assert_runs_once(
                    self.client,
                    "POST",
                    f"/{path}",
                    headers={"Authorization": "Bearer alice"},
                    effects=Order.objects.filter(item=path).count,
                    crashes=crashes,
                    at_once=at_once,
                )
