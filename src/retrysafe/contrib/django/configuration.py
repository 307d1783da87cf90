"""The setting `RETRYSAFE`, and what is made of it: one protection for all views of the project.

    RETRYSAFE = {
        "STORE": "default",
        "CALLER": "retrysafe.contrib.django.callers.authenticated_user",
    }

A name that nobody knows is an error: a misspelt option must not be a silent default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from retrysafe import forks
from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.contrib.django.databases import DatabaseStore, is_testing, url_of
from retrysafe.contrib.django.view_rules import located_rules
from retrysafe.contrib.django.views import outcome_of, serve_view
from retrysafe.contrib.views import require_no_acceptance
from retrysafe.errors import RetrysafeError
from retrysafe.http import resumers, thread_requests
from retrysafe.http.asgi import IdempotencyMiddleware
from retrysafe.http.protection import Protection
from retrysafe.http.routes import Route
from retrysafe.http.rules import Rule
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.calls import calls_of

SETTING: Final = "RETRYSAFE"
# What the options of Idempotency and of Protection are called in the setting.
_IDEMPOTENCY_NAMES: Final = {
    "POLICY": "policy",
    "FINGERPRINT": "fingerprint",
    "SECRET": "secret",
    "CACHE": "cache",
    "OBSERVERS": "observers",
}
_PROTECTION_NAMES: Final = {
    "FAIL_OPEN": "fail_open",
    "STORE_TIMEOUT": "store_timeout",
    "POLICY_PATH": "policy_path",
    "STATUS_PATH": "status_path",
    "CHALLENGE": "challenge",
    "BREAKER": "breaker",
    "LIMITS": "limits",
}
_NAMES: Final = {"STORE", "CALLER", "RULES", "POLICY_PAGE", *_IDEMPOTENCY_NAMES, *_PROTECTION_NAMES}


class Configuration:
    """What the project's views share: the protection, and the two objects.

    Views that block use `Idempotency`, views of an event loop `AsyncIdempotency`, both over the
    same store. Raises `ImproperlyConfigured`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - _NAMES)
        if unknown:
            raise ImproperlyConfigured(
                f"{SETTING} has no {', '.join(unknown)}: it takes {', '.join(sorted(_NAMES))}"
            )
        for name in ("STORE", "CALLER"):
            if name not in options:
                raise ImproperlyConfigured(f"{SETTING} needs {name}: {_WHY[name]}")
        self._store = _store_of(options)
        self._options = _renamed(options, _IDEMPOTENCY_NAMES)
        if isinstance(self._store, DatabaseStore) and is_testing():
            # It would remember what a test's end has rolled back.
            self._options["cache"] = False
        try:
            self.idempotency = Idempotency(self._store, **self._options)
            self.calls = calls_of(self.idempotency)
            self.protection = Protection(
                self.calls.settings,
                caller=_imported(options, "CALLER"),
                rules=_imported(options, "RULES") if "RULES" in options else (),
                policy_page=_imported(options, "POLICY_PAGE") if "POLICY_PAGE" in options else True,
                outcome_of=outcome_of,
                **_renamed(options, _PROTECTION_NAMES),
            )
        except RetrysafeError as error:
            raise ImproperlyConfigured(f"{SETTING}: {error}") from error
        for route in self.protection.table.routes:
            require_no_acceptance(route.rule)
        thread_requests.register(self.protection, self.calls, self.protection.table.routes)
        resumers.protections.add(self)
        # Both locks may be taken again by a signal's handler that comes while this is made.
        self._lock = threading.RLock()
        self._on_loop: IdempotencyMiddleware | None = None
        self._routes: dict[tuple[int, str | None], Route | None] = {}

    @property
    def on_loop(self) -> IdempotencyMiddleware:
        """The same protection for views of an event loop, made when the first one is asked."""
        if self._on_loop is None:
            with self._lock:
                if self._on_loop is None:
                    store = self._store
                    if isinstance(store, DatabaseStore):
                        store = store.for_loop()
                    idempotency = AsyncIdempotency(store, **self._options)
                    calls_of(idempotency).run_times = self.calls.run_times
                    self._on_loop = IdempotencyMiddleware.sharing(
                        serve_view, idempotency, self.protection
                    )
        return self._on_loop

    def route(
        self, rule: Rule, path: str | None, locate: Callable[[], Rule | None]
    ) -> Route | None:
        """The rule made ready for a path; a rule lives as long as the view that holds it."""
        known = (id(rule), path)
        if known not in self._routes:
            at_path = locate()
            self._routes[known] = None if at_path is None else self.made_route(at_path)
        return self._routes[known]

    def made_route(self, rule: Rule) -> Route:
        """A rule made ready; raises `PolicyInvalid` and `SecretMissing`."""
        route = Route(rule, self.calls.settings)
        thread_requests.register(self.protection, self.calls, (route,))
        return route

    def refresh(self) -> None:
        """For workers: looks at all views; raises what is wrong with them."""
        for rule in located_rules():
            self.made_route(rule)


_WHY: Final = {
    "STORE": "a database of the project, such as 'default', the URL of a store, such as "
    "'sqlite:////var/lib/shop/shop.db', or a store object",
    "CALLER": "whose keys they are, a function of the request such as "
    "'retrysafe.contrib.django.callers.authenticated_user', or GLOBAL for one namespace shared by "
    "everybody",
}


def _store_of(options: Mapping[str, Any]) -> Any:
    """A store, its URL, or the store in the database of that alias."""
    value = options["STORE"]
    if isinstance(value, str) and value in settings.DATABASES:
        if not is_testing():
            url_of(value)  # What is wrong with it is told now.
        return DatabaseStore(value)
    return _imported(options, "STORE", "://")


def store_url() -> str:
    """The URL of the store that the setting names; raises `ImproperlyConfigured`."""
    options = getattr(settings, SETTING, {})
    value = options.get("STORE")
    if isinstance(value, str) and value in settings.DATABASES:
        return url_of(value)
    if isinstance(value, str) and "://" in value:
        return value
    raise ImproperlyConfigured(
        f"{SETTING}['STORE'] is an object, and a command needs a database or a URL there"
    )


def _imported(options: Mapping[str, Any], name: str, mark: str = "") -> Any:
    """An option itself, or what a dotted name means; a text with the mark is no name."""
    value = options[name]
    if not isinstance(value, str) or (mark and mark in value):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"{SETTING} has no usable {name}, a text there is a dotted name: {error}"
        ) from error


def _renamed(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {own: options[name] for name, own in names.items() if name in options}


class _Holder:
    """The configuration that was made of the setting; None before that."""

    def __init__(self) -> None:
        self.made: Configuration | None = None
        self.after_fork_in_child()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Takes another lock: that one may be held by a thread of the parent."""
        self.lock = threading.RLock()


_holder: Final = _Holder()


def current() -> Configuration:
    """What the setting says, made when it is first needed; raises `ImproperlyConfigured`."""
    made = _holder.made
    if made is not None:
        return made
    forks.refresh_if_stale()
    with _holder.lock:
        if _holder.made is None:
            options = getattr(settings, SETTING, None)
            if not isinstance(options, Mapping):
                raise ImproperlyConfigured(
                    f"protected views need the setting {SETTING}, a dictionary with STORE and "
                    "CALLER"
                )
            _holder.made = Configuration(options)
        return _holder.made


def _forget(*, setting: str, **rest: Any) -> None:
    """Tests change settings; what was made of the old ones is closed."""
    del rest
    if setting == SETTING:
        with _holder.lock:
            made, _holder.made = _holder.made, None
        if made is not None:
            made.idempotency.close()


setting_changed.connect(_forget)
