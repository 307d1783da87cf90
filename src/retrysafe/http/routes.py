"""Routes: rules made ready, and which of them a request belongs to.

Owns the match of method and path: what the rule sees must be what the application serves. It must
not know requests beyond that, nor any framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.model import Ending
from retrysafe.core.policy import InFlight
from retrysafe.core.settings import Settings
from retrysafe.errors import PolicyInvalid
from retrysafe.http.key_sources import FieldsKey, HeaderKey, described
from retrysafe.http.paths import PathPattern, check_path, names_in, samples_of
from retrysafe.http.request import plain_path, served_path
from retrysafe.http.responses import Response, ResponseCodec
from retrysafe.http.rules import ACCEPT, STATE_CHANGING, Accept, Rule, require_rules
from retrysafe.http.stored_request import Resumable

# The column of the stores that holds an operation's name.
_NAME_LIMIT_CHARACTERS: Final = 255


class _Listed:
    """The statuses after which nothing happened, asked of whatever a run came to."""

    __slots__ = ("_statuses",)

    def __init__(self, statuses: Iterable[int]) -> None:
        self._statuses = frozenset(statuses)

    def __call__(self, came_to: Any) -> bool:
        # An exception becomes a 500, whatever the policy of the route says of its type. Of a
        # response that was not held back, nobody knows what its client has seen.
        return (
            type(came_to) is Response
            and came_to.status in self._statuses
            and not came_to.is_streamed
            and not came_to.doubt
        )


class Route:
    """A rule made ready: everything about it that a request would else work out again."""

    __slots__ = (
        "_beside",
        "accepts_duplicates",
        "accepts_first",
        "codec",
        "fingerprint",
        "has_header_key",
        "is_beside",
        "is_required",
        "judge",
        "made_policy",
        "maker",
        "nothing_happened",
        "operations",
        "policy",
        "resumable",
        "rule",
        "short_digits",
        "told_of_reuse",
    )

    def __init__(self, rule: Rule, settings: Settings) -> None:
        policy = rule.policy or settings.policy
        # What is stored of a request for a worker; None where nothing is.
        self.resumable: Resumable | None = None
        if rule.resumable:
            self.resumable = Resumable() if rule.resumable is True else rule.resumable
            # What cannot be stored is refused, and by its head where that says so.
            limit_bytes = min(rule.request_limit_bytes, policy.arguments_limit_bytes)
            rule = replace(rule, request_limit_bytes=limit_bytes)
        self.rule = rule
        # Whether every first request is told 202 as soon as it runs.
        self.accepts_first = self.resumable is not None and self.resumable.accepts
        # Whether a duplicate of a running request is told 202; the engine just has it fail.
        self.accepts_duplicates = rule.in_flight is ACCEPT or self.accepts_first
        if rule.in_flight is not None:
            in_flight = InFlight.FAIL if isinstance(rule.in_flight, Accept) else rule.in_flight
            policy = policy.with_changes(in_flight=in_flight)
        source = rule.key
        self.policy = source.checked(policy, settings.secrets.value)
        # What makes the keys that clients do not send, and the policy of those.
        self.maker = source.otherwise if isinstance(source, HeaderKey) else source
        self.made_policy = (
            self.policy
            if self.maker is None
            else self.maker.checked(policy, settings.secrets.value)
        )
        # What a client is told whose request another one had the key of, where it has sent none.
        self.told_of_reuse = None if self.maker is None else _told_of_reuse(self.maker, rule)
        self.fingerprint = rule.fingerprint or settings.fingerprint
        self.codec = ResponseCodec(rule.headers)
        self.judge: Callable[[Any], Ending] = rule.stored.ending_of
        # Whether a response is listed as one after which nothing happened; None without a list.
        self.nothing_happened: Callable[[Any], bool] | None = None
        if rule.nothing_happened:
            self.nothing_happened = _Listed(rule.nothing_happened)
        self.is_required = rule.required
        self.has_header_key = type(source) is HeaderKey
        # A length of so few digits is within the limit whatever they are.
        self.short_digits = len(str(rule.request_limit_bytes)) - 1
        shown = rule.path or "*"
        self.operations = {
            method: (rule.name or f"{method} {shown}")[:_NAME_LIMIT_CHARACTERS]
            for method in rule.methods
        }
        # Whether it is for paths that are not spelled like the rule's.
        self.is_beside = False
        self._beside: Route | None = None

    def beside(self) -> Route:
        """The same for a path that is not spelled like the rule's: what is kept differs."""
        if self._beside is None:
            twin = copy(self)
            twin.is_beside = True
            twin.judge = self.rule.stored.ending_beside
            self._beside = twin
        return self._beside


def _told_of_reuse(maker: FieldsKey | BodyKey, rule: Rule) -> str:
    """As `problems.KEY_REUSED`, for a client that cannot choose another key."""
    told = (
        f"Requests are recognised here by {described(maker)}. An earlier request that has these in "
        "common with this one differs from it in something else. Nothing was run; send that "
        "request unchanged to get its outcome."
    )
    if rule.nothing_happened:
        statuses = ", ".join(map(str, rule.nothing_happened))
        told += f" A corrected request is taken after a response with status {statuses} alone."
    return told


def require_one_operation(rule: Rule, names: Collection[str] = ()) -> None:
    """Raises `PolicyInvalid` for a natural key that the path of its rule cannot make.

    `names` are parameters that requests have beside those of the path.
    """
    if not isinstance(rule.key, FieldsKey) or not rule.protected:
        return
    if rule.path is None or rule.path.endswith("*"):
        # Fields that are equal would make one key for the payment of an order and its refund.
        covered = "covers all paths" if rule.path is None else f"covers everything in {rule.path}"
        raise PolicyInvalid(
            f"FieldsKey makes one key of equal fields, and this rule {covered}: its operations "
            "would share their keys. Write a rule for each operation, with the path of that one, "
            "or next to its endpoint"
        )
    require_parameters(rule, names_in(rule.path).union(names))


def require_name_at_host(
    rule: Rule, host: str, hosts: dict[str, str], fingerprint: FingerprintRule
) -> None:
    """Raises `PolicyInvalid` for keys that are made here and would be those of several hosts.

    Neither the name of an operation nor a fingerprint tells hosts apart: a payment to one shop
    would get the response of another. `host` is as rules write it, `{shop}.example.org`, and empty
    for routes of every host; `hosts` is what is known of the names so far.
    """
    maker = rule.key.otherwise if isinstance(rule.key, HeaderKey) else rule.key
    if maker is None or not rule.protected:
        return
    place = rule.path or "this rule"
    told = f"keys of {type(maker).__name__} do not tell hosts apart, and the routes of {place}"
    if host and not rule.name:
        raise PolicyInvalid(
            f"{told} are those of one host: give the rule a name that is for this host alone, such "
            "as name='shop A: pay'"
        )
    if rule.name and hosts.setdefault(rule.name, host) != host:
        raise PolicyInvalid(
            f"{told} have the name {rule.name!r} at several hosts: write a rule for each host, "
            "with a name that is for this one alone"
        )
    names = names_in(host)
    if isinstance(maker, FieldsKey):
        if not names.issubset(maker.parameters):
            listed = ", ".join(f'"{{{name}}}"' for name in sorted(names))
            raise PolicyInvalid(f"{told} are those of every {host}: add {listed} to its fields")
    elif names and b"host" not in fingerprint.header_names:
        raise PolicyInvalid(
            f"{told} are those of every {host}: write "
            "fingerprint=FingerprintRule(headers=('Host',))"
        )


def refuse_at_host(rule: Rule) -> None:
    """Raises `PolicyInvalid` for keys that a rule by path makes, where its route is of one host.

    A rule by path holds at every host that has the path.
    """
    if rule.key != HeaderKey():
        raise PolicyInvalid(
            f"keys that are made here do not tell hosts apart, and a rule for {rule.path} holds at "
            "every host: write the rule next to the view, with a name that is for this host alone"
        )


def require_parameters(rule: Rule, names: Collection[str]) -> None:
    """Raises `PolicyInvalid` for a natural key of a parameter that no request of its route has."""
    if not isinstance(rule.key, FieldsKey) or not rule.protected:
        return
    for name in rule.key.parameters:
        if name not in names:
            known = ", ".join(f"{{{item}}}" for item in sorted(names)) or "none"
            raise PolicyInvalid(
                f"FieldsKey takes {{{name}}} from the path, and {rule.path or 'its route'} has no "
                f"such parameter (it has {known}): write /{name} for a field of the body, or name "
                "the parameter as the path does"
            )


NO_PARAMETERS: Final[Mapping[str, Any]] = MappingProxyType({})
Match = tuple[Route, Mapping[str, Any]]


class RouteTable:
    """All routes in their order; the first whose method and path match is the request's."""

    __slots__ = ("_beside", "_exact", "_methods", "_nowhere", "_patterns", "routes")

    def __init__(self, rules: Iterable[Rule], settings: Settings) -> None:
        listed = tuple(rules)
        require_rules(listed)
        self.routes = tuple(Route(rule, settings) for rule in listed)
        # Plain paths are looked up: as they are written, and as they count. Only patterns before a
        # plain match are tried one by one.
        self._nowhere: _Placed = (len(self.routes), None)
        self._exact: dict[tuple[str, str], _Placed] = {}
        self._beside: dict[tuple[str, str], _Placed] = {}
        self._patterns: list[tuple[int, frozenset[str], PathPattern | None, Route]] = []
        self._methods = frozenset(method for route in self.routes for method in route.rule.methods)
        # One segment more than any rule names.
        depth = 1 + max(((rule.path or "").count("/") for rule in listed), default=0)
        for position, route in enumerate(self.routes):
            if route.rule.path is not None:
                check_path(route.rule.path, is_exact=route.rule.exact_path)
            require_one_operation(route.rule)
            self._add(position, route)
            self._require_reached(position, route.rule, depth)

    def _add(self, position: int, route: Route) -> None:
        path = route.rule.path
        if path is None or "{" in path or path.endswith("*"):
            pattern = None if path is None else PathPattern(path)
            self._patterns.append((position, frozenset(route.rule.methods), pattern, route))
            return
        for method in route.rule.methods:
            self._exact.setdefault((method, path), (position, _match_of(route)))
            beside = (position, _match_of(route.beside()))
            if route.rule.exact_path:
                # See `served_path`.
                self._exact.setdefault((method, path + "\n"), beside)
            else:
                self._beside.setdefault((method, plain_path(path)), beside)

    def _require_reached(self, position: int, rule: Rule, depth: int) -> None:
        """Raises `PolicyInvalid` for a rule that the ones before it leave no request.

        What it says would be lost in silence: that a key is required, or where it comes from.
        """
        takers: set[int] = set()
        for method in rule.methods:
            for sample in samples_of(rule.path, depth):
                spelled = (sample,) if rule.exact_path else (sample, *_twins(sample))
                for path in spelled:
                    taker = self._look(method, path)[0]
                    if taker == position:
                        return
                    takers.add(taker)
        earlier = " and ".join(
            f"rule {index + 1} ({_shown(self.routes[index].rule)})" for index in sorted(takers)
        )
        raise PolicyInvalid(
            f"rule {position + 1} ({_shown(rule)}) would never count, because the first rule that "
            f"matches does: {earlier} matches all its requests. Put the rule for fewer requests "
            "first, or leave it out"
        )

    def find(self, method: str, path: str) -> Match | None:
        """The route of a request, with what its pattern took from the path.

        The method is in upper case. A path that is off is found as well, and then matches nothing.
        """
        return self._look(method, path)[1]

    def is_covered(self, method: str, path: str) -> bool:
        """Whether a rule fits, also one that leaves its requests alone."""
        return self._look(method, path) is not self._nowhere

    def _look(self, method: str, path: str) -> _Placed:
        if method not in self._methods:
            return self._nowhere
        found = self._exact.get((method, path))
        if found is None:
            found = self._nowhere
            if self._beside:
                found = self._beside.get((method, plain_path(path)), found)
        for position, methods, pattern, route in self._patterns:
            if position > found[0]:
                break
            if method not in methods:
                continue
            if pattern is None:
                return position, _match_of(route)
            taken = pattern.match(path)
            if taken is None:
                taken = pattern.match(_as_written(path, route.rule))
                route = route.beside()  # noqa: PLW2901 — the same, for another spelling.
            if taken is not None:
                return position, _match_of(route, taken)
        return found


# A match, and the place of its rule in the list; no match for one that is off, or past the list.
_Placed = tuple[int, Match | None]


def _match_of(route: Route, parameters: Mapping[str, Any] = NO_PARAMETERS) -> Match | None:
    return None if not route.rule.protected else (route, parameters)


def _twins(path: str) -> tuple[str, str]:
    """The other spellings of a path, with a slash at its end and without."""
    plain = plain_path(path)
    return plain, plain + "/"


def _shown(rule: Rule) -> str:
    """The rule in a message: the methods and the path that it is for."""
    methods = "" if rule.methods == STATE_CHANGING else f"{', '.join(rule.methods)} "
    return f"{methods}{rule.path or 'all paths'}"


def _as_written(path: str, rule: Rule) -> str:
    """The path in the spelling of a pattern, which may end with a slash or with a star."""
    assert rule.path is not None  # A pattern has one.
    if rule.exact_path:
        return served_path(path)
    plain = plain_path(path)
    # `/charges/*` begins with `/charges/`, which is `/charges` by another spelling.
    return plain + "/" if rule.path.endswith(("/", "*")) and plain != "/" else plain
