"""The pages of an application: its policy, and the status of a key for the key's own caller.

Owns their paths, who may read them and the order in which a page is put together. What stands on
each of them is for `policy_page` and `status_page` to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.core.machine import how_far
from retrysafe.core.model import StoredKey
from retrysafe.core.run_times import RunTimes
from retrysafe.errors import CallerMissing, KeyInvalid, PolicyInvalid, StoreError
from retrysafe.http import problems
from retrysafe.http.callers import RotatingCaller
from retrysafe.http.headers import link_path
from retrysafe.http.policy_page import PolicyReaders, checked_readers, may_read, policy_response
from retrysafe.http.problems import Refusals, problem_of
from retrysafe.http.request import Request
from retrysafe.http.responses import NO_STORE, Header, Response, uncached
from retrysafe.http.routes import Route
from retrysafe.http.status_page import status_response

POLICY_PATH: Final = "/idempotency-policy"
STATUS_PATH: Final = "/idempotency-status/"
PAGE_METHODS: Final = ("GET", "HEAD")


class Pages:
    """The policy page and the status page of one application."""

    def __init__(
        self,
        policy_path: str,
        status_path: str,
        readers: PolicyReaders,
        routes: Iterable[Route],
        refusals: Refusals,
        private: list[Header],
        *,
        has_callers: bool,
    ) -> None:
        for name, path in (("policy_path", policy_path), ("status_path", status_path)):
            if not (isinstance(path, str) and path.startswith("/")):
                raise PolicyInvalid(f"{name} starts with a slash, got {path!r}")
        self.policy_path = policy_path
        self.status_path = status_path.rstrip("/") + "/"
        self._readers = checked_readers(readers)
        self.has_policy = readers is not False
        self._routes = tuple(routes)
        # Routes whose rules stand next to their endpoints; the framework knows which ones.
        self.endpoints: tuple[Route, ...] = ()
        self._refusals = refusals
        # What is said to caches of a response that is for its caller alone.
        self._private = private
        self._has_callers = has_callers

    def serve(self, path: str) -> bool:
        """Whether a GET or HEAD of this path is answered here and not by the application."""
        if path == self.policy_path:
            return self.has_policy
        return path.startswith(self.status_path)

    async def page(
        self,
        path: str,
        request: Request,
        prefix: str,
        *,
        caller_of: Callable[[Request], Awaitable[str | GlobalCaller | None]],
        read: Callable[[Key], Awaitable[StoredKey | None]],
        run_times: RunTimes,
    ) -> Response:
        """The page of a path inside the application, which is mounted at `prefix`."""
        if path == self.policy_path:
            shown = self._policy(request, prefix)
        else:
            caller = await caller_of(request)
            shown = await self._status(path, request, prefix, caller, read, run_times)
        if request.method == "HEAD":
            shown.body = b""
        return shown

    def _policy(self, request: Request, prefix: str) -> Response:
        if not may_read(self._readers, request):
            return Response(404, [(b"content-length", b"0"), NO_STORE], b"")
        return policy_response(
            (*self._routes, *self.endpoints),
            request.header(b"accept"),
            policy_url=f"{link_path(prefix)}{self.policy_path}",
            status_url=f"{link_path(prefix)}{self.status_path}",
            has_callers=self._has_callers,
            is_public=self._readers is True,
        )

    async def _status(
        self,
        path: str,
        request: Request,
        prefix: str,
        caller: str | GlobalCaller | None,
        read: Callable[[Key], Awaitable[StoredKey | None]],
        run_times: RunTimes,
    ) -> Response:
        """What a caller is shown of its key.

        Several records are read where the caller has a form by every secret: the furthest counts.
        """
        refusals = self._refusals
        if caller is None:
            return refusals.unknown_caller(request, prefix)
        callers: Iterable[str | GlobalCaller] = (caller,)
        if isinstance(caller, RotatingCaller):
            callers = caller.by_tag.values()
        try:
            keys = [Key(path[len(self.status_path) :], caller=each) for each in callers]
        except CallerMissing:
            # Empty or over-long: as for a request with a key, whose it is cannot be told.
            return refusals.unknown_caller(request, prefix)
        except KeyInvalid:
            return refusals.problem(problems.KEY_UNKNOWN, request, prefix)
        text, context = keys[0].text, refusals.context(request, prefix)
        try:
            forms = [await read(key) for key in keys]
        except StoreError as error:
            refusal = problem_of(error, context, key=text)
            assert refusal is not None  # Every error of a store has its kind.
            return refusal
        found = (item for item in forms if item is not None)
        stored = max(found, key=lambda item: how_far(item.condition), default=None)
        response = status_response(stored, context, text, run_times)
        response.headers = uncached(response.headers, self._private)
        return response
