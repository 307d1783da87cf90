"""Runs of WSGI applications that go on behind a 202, each in a thread of its own.

Owns who answers: the thread of the server while the run is prompt, nobody after that. Only requests
that are stored with their claim run like this. When the process ends, such a thread ends with it in
the middle of its work, and a worker goes on from there.
"""

from __future__ import annotations

import contextvars
import logging
import threading

from retrysafe.http import thread_requests
from retrysafe.http.answers import first_look
from retrysafe.http.plan import Plan
from retrysafe.http.protection import Protection
from retrysafe.http.responses import Response
from retrysafe.http.wsgi_run import WsgiRun
from retrysafe.runtime.calls import Calls

_logger = logging.getLogger("retrysafe")


def is_accepted(plan: Plan) -> bool:
    """Whether a request may be answered with 202 before it has ended."""
    route = plan.route
    return (
        route.resumable is not None
        and (plan.preference.respond_async or route.accepts_first)
        and plan.resumption is None
    )


class BackgroundRun:
    """One request in a thread of its own; it has a place among the background runs."""

    def __init__(self, protection: Protection, calls: Calls, plan: Plan, run: WsgiRun) -> None:
        self._protection = protection
        self._calls = calls
        self._plan = plan
        self._run = run
        self._lock = threading.Lock()
        # Set when the application begins, and when all has ended.
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        self._is_left = False
        self._response: Response | None = None
        self._error: BaseException | None = None
        run.on_begin = self._has_begun.set

    def answered(self) -> Response:
        """The response, or 202 when it does not come in time, counted from the start of the run.

        Nothing is promised before the key is claimed: a refusal must reach the client itself.
        Raises as `thread_requests.answered` does.
        """
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._work,), name="retrysafe-background", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            self._protection.background.leave(self._run)
            raise
        self._has_begun.wait()
        self._has_ended.wait(self._plan.preference.wait_seconds or 0)
        with self._lock:
            self._is_left = not self._has_ended.is_set() and not self._run.is_passing
        if self._is_left:
            self._run.leave()
            hint = first_look(self._plan.operation, self._plan.policy, self._calls.run_times)
            return self._protection.answers.accepted(self._plan, hint)
        self._has_ended.wait()
        if self._error is not None:
            raise self._error
        assert self._response is not None  # It has ended, and not by an error.
        return self._response

    def _work(self) -> None:
        run, response, error = self._run, None, None
        try:
            response = thread_requests.answered(self._protection, self._calls, self._plan, run)
        except BaseException as raised:
            error = raised
        finally:
            self._protection.background.leave(run)
            with self._lock:
                self._response, self._error = response, error
                self._has_ended.set()
                is_left = self._is_left
            self._has_begun.set()
        if is_left:
            run.close()
            if error is not None:
                _logger.error("a protected request failed after its 202", exc_info=error)
