"""Who may look at the dashboard, and who may act: tokens, sessions, forms and hosts.

A session is a signed cookie, so that nothing is stored and every worker process knows it. The key
of the signature is the token: another token ends all sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from typing import Final
from urllib.parse import urlsplit

from retrysafe.dashboard.web import Request
from retrysafe.errors import InvalidInput

COOKIE: Final = "retrysafe_dashboard"
SESSION_SECONDS: Final = 12 * 3600
TOKEN_LEAST_CHARACTERS: Final = 16
# Wrong tokens: of one address, and of all. Who types is not stopped by this, who guesses is.
TRIES_OF_ONE: Final = 10
TRIES_OF_ALL: Final = 100
_WINDOW_SECONDS: Final = 60.0
_ADDRESS_LIMIT: Final = 1_000
LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class TooManyTries(Exception):
    """Too many wrong tokens in the last minute."""


class Tries:
    """Counts wrong tokens, for a minute each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def require_room(self, address: str) -> None:
        """Raises `TooManyTries`, also for the right token: else guessing would go on."""
        with self._lock:
            if self._count(address) >= TRIES_OF_ONE or self._count("all") >= TRIES_OF_ALL:
                raise TooManyTries

    def note_wrong(self, address: str) -> None:
        """Counts a wrong token."""
        with self._lock:
            for name in (address, "all"):
                count = self._count(name)
                began, _ = self._by_address.get(name, (0.0, 0))
                if count == 0:
                    began = time.monotonic()
                self._by_address[name] = (began, count + 1)
                self._by_address.move_to_end(name)
            while len(self._by_address) > _ADDRESS_LIMIT:
                self._by_address.popitem(last=False)

    def _count(self, name: str) -> int:
        began, count = self._by_address.get(name, (0.0, 0))
        return count if time.monotonic() - began < _WINDOW_SECONDS else 0


class Access:
    """The token, its sessions, and the hosts that are answered."""

    def __init__(self, token: str | None, hosts: frozenset[str] | None) -> None:
        if token is not None and len(token) < TOKEN_LEAST_CHARACTERS:
            raise InvalidInput(
                f"the dashboard's token has {len(token)} characters, and at least "
                f"{TOKEN_LEAST_CHARACTERS} are needed: make one with "
                'python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        self._token = token
        self._hosts = hosts
        self._tries = Tries()

    @property
    def has_token(self) -> bool:
        """Whether anybody can act."""
        return self._token is not None

    def is_for_us(self, request: Request) -> bool:
        """Whether the request names a host of ours.

        A page of another site whose name leads to the loopback address does not.
        """
        if self._hosts is None:
            return True
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:
            return False
        return host in self._hosts

    def takes(self, token: str, request: Request) -> bool:
        """Whether this is the token; raises `TooManyTries`."""
        self._tries.require_room(request.client)
        if self._token is not None and hmac.compare_digest(token.encode(), self._token.encode()):
            return True
        self._tries.note_wrong(request.client)
        return False

    def new_session(self) -> str:
        """A cookie's value for somebody who has the token."""
        session = f"{int(time.time()) + SESSION_SECONDS}.{secrets.token_urlsafe(16)}"
        return f"{session}.{self._signature('session', session)}"

    def session(self, request: Request) -> str:
        """The valid session of a request, or the empty text."""
        value = request.cookie(COOKIE)
        session, _, signature = value.rpartition(".")
        expires, _, _ = session.partition(".")
        if (
            self._token is None
            or not hmac.compare_digest(
                signature.encode(), self._signature("session", session).encode()
            )
            or int(expires) < time.time()
        ):
            return ""
        return session

    def may_act(self, request: Request) -> bool:
        """Whether the request carries the token, by its session or as a bearer token."""
        token = _bearer_of(request)
        return bool(self.session(request)) if token is None else self.takes(token, request)

    def form_mark(self, request: Request) -> str:
        """What a form of this session carries; other sites cannot know it."""
        session = self.session(request)
        return self._signature("form", session) if session else ""

    def is_own_form(self, request: Request, mark: str) -> bool:
        """Whether the request was sent by one of our pages, or by a script with the token."""
        if not is_same_origin(request):
            return False
        if _bearer_of(request) is not None:
            return True
        wanted = self.form_mark(request)
        return bool(wanted) and hmac.compare_digest(mark.encode(), wanted.encode())

    def _signature(self, purpose: str, text: str) -> str:
        key = (self._token or "").encode()
        return hmac.new(key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


def _bearer_of(request: Request) -> str | None:
    """The bearer token of a request; None for any other authorization, as of a proxy's users."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def is_same_origin(request: Request) -> bool:
    """What browsers say about where a form comes from; scripts say nothing."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        # All browsers of today say it, and a proxy that names another host does not confuse it.
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc == request.headers.get("host", "")
    except ValueError:
        return False
