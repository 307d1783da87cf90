"""URLs of PostgreSQL: our own options apart from the driver's, and mistakes refused at once.

A URL is libpq's. psycopg takes it as it is; asyncpg knows most of it, and would send the rest to
the server as settings, which refuses them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from retrysafe.errors import InvalidInput, StoreUrlInvalid
from retrysafe.stores.postgres.drivers.port import Keepalive, PoolOptions
from retrysafe.stores.postgres.naming import checked_schema_name

_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# Which servers a driver may take, by the words of libpq; claims cannot be made on the others.
_WRITABLE_SERVERS: Final = ("read-write", "primary", "any")
_LONE_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_COLON_OR_AT: Final = re.compile(r":|%3a|@", re.IGNORECASE)
_USER_AND_PASSWORD: Final = re.compile(r"([^:/@?]*?)(?::|%3a)[^@]*", re.IGNORECASE | re.DOTALL)
# In a URL, and in the list of settings that libpq takes as well; there the rest is hidden with it.
_PASSWORD_OPTION: Final = re.compile(r"(password\s*=)[^&]*", re.IGNORECASE)
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
_PORT_LIMIT: Final = 65_535
# More connections than this, or more seconds, are a mistake.
_NUMBER_LIMIT: Final = 100_000

# What libpq knows and asyncpg does not, and may be left out of its URL: how a silent peer is found
# out (set on the socket instead), names and encodings that retrysafe decides, and preferences.
KEEPALIVE_NAMES: Final = frozenset(field.name for field in fields(Keepalive))
_LEFT_OUT: Final = KEEPALIVE_NAMES | frozenset(
    {
        "application_name",
        "fallback_application_name",
        "client_encoding",
        "sslcompression",
        "load_balance_hosts",
    }
)
# What may be left out with these values only: they ask for what asyncpg does anyway. With any other
# it is a promise about who may listen or answer, and leaving it out would break that in silence.
_KEPT_ANYWAY: Final[dict[str, frozenset[str]]] = {
    "channel_binding": frozenset({"disable", "prefer"}),
    "gssencmode": frozenset({"disable", "prefer"}),
    "gssdelegation": frozenset({"0"}),
    "sslcertmode": frozenset({"allow"}),
    "sslsni": frozenset({"1"}),
    "hostaddr": frozenset(),
    "max_protocol_version": frozenset(),
    "min_protocol_version": frozenset(),
    "oauth_client_id": frozenset(),
    "oauth_client_secret": frozenset(),
    "oauth_issuer": frozenset(),
    "oauth_scope": frozenset(),
    "replication": frozenset(),
    "require_auth": frozenset(),
    "requirepeer": frozenset(),
    "scram_client_key": frozenset(),
    "scram_server_key": frozenset(),
    "servicefile": frozenset(),
    "sslcrldir": frozenset(),
    "sslkeylogfile": frozenset(),
}


def without_password(url: str) -> str:
    """The URL as it may be shown in messages and logs.

    What is written wrong is shown too, so a password may be where none belongs: up to the last @,
    because it may hold any character that it should have escaped, and in the place of a port.
    """
    if url.startswith("sqlite:"):
        return url
    scheme, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    secret, at, address = rest.rpartition("@")
    if slashes:
        hosts, slash, path = address.partition("/")
        hosts, question, query = hosts.partition("?")
        shown_hosts = ",".join(map(_shown_host, hosts.split(",")))
        address = f"{shown_hosts}{question}{query}{slash}{path}"
    shown = f"{scheme}{slashes}{_shown_user(secret)}{at}{address}"
    return _PASSWORD_OPTION.sub(r"\1***", shown)


def _shown_user(secret: str) -> str:
    """What may be shown of all that is before the last @."""
    if not _COLON_OR_AT.search(secret):
        return secret
    named = _USER_AND_PASSWORD.fullmatch(secret)
    # With a second @ nobody knows where the name ends.
    return f"{named[1]}:***" if named else "***"


def _shown_host(host: str) -> str:
    port = _port_of(host)
    if not port or port.isdigit():
        return host
    name, bracket, _ = host.partition("]" if host.startswith("[") else ":")
    return f"{name}]:***" if bracket == "]" else f"{name}:***"


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """What a PostgreSQL URL says, apart: the driver's part, and retrysafe's own options."""

    # For messages and logs, without the password.
    location: str
    schema_name: str
    pool: PoolOptions
    # The driver's.
    _parts: SplitResult
    options: dict[str, str]

    @property
    def for_libpq(self) -> str:
        """The URL without retrysafe's own options."""
        return _with(_address(self._parts), self.options)

    @property
    def for_asyncpg(self) -> str:
        """The same with what asyncpg knows; raises `StoreUrlInvalid` for what it cannot keep to."""
        options = {}
        for name, value in self.options.items():
            if name in _LEFT_OUT or value in _KEPT_ANYWAY.get(name, ()):
                continue
            if name in _KEPT_ANYWAY:
                # Some values are secrets; the others help to find it.
                what = f"{name}={value}" if _KEPT_ANYWAY[name] else name
                raise StoreUrlInvalid(
                    f"{self.location}: AsyncIdempotency connects through asyncpg, which cannot do "
                    f"{what}; take it out of the URL if you can do without, or use Idempotency, "
                    "whose driver can"
                )
            options[name] = value
        return _with(_address(self._parts), options)


def postgres_url(url: str) -> PostgresUrl:
    """The parts of a URL; `?schema=…&prepared=off&pool=8` are retrysafe's options.

    Raises `StoreUrlInvalid` for what no driver could connect with: trying again would not help.
    """
    parts = _split(url)
    options = _options(parts)
    location = without_password(_address(parts))
    schema_name = options.pop("schema", "retrysafe")
    prepared = options.pop("prepared", "on")
    default = PoolOptions()
    pool = _number(options.pop("pool", str(default.size_limit)))
    seconds = _number(options.pop("connect_timeout", str(default.connect_timeout.seconds)))
    if prepared not in ("on", "off") or pool is None:
        raise StoreUrlInvalid(f"{location}: prepared is on or off, pool is a number from 1 up")
    if seconds is None:
        raise StoreUrlInvalid(f"{location}: connect_timeout is a number of seconds from 1 up")
    keepalive = _keepalive(location, options)
    if options.get("sslmode", "prefer") not in _SSL_MODES:
        raise StoreUrlInvalid(f"{location}: sslmode is one of {', '.join(_SSL_MODES)}")
    _check_servers(location, options.get("target_session_attrs", "any"))
    try:
        checked_schema_name(schema_name)
    except InvalidInput as error:
        raise StoreUrlInvalid(f"{location}: {error}") from None
    return PostgresUrl(
        location=location,
        schema_name=schema_name,
        pool=PoolOptions(
            size_limit=pool,
            connect_timeout=timedelta(seconds=seconds),
            has_prepared_statements=prepared == "on",
            keepalive=keepalive,
        ),
        _parts=parts,
        options=options,
    )


def one_per_server(url: str) -> list[str]:
    """The URLs of the servers that a URL lists, in its order; itself when it lists only one.

    Not left to the drivers: a silent server must not use up the time of the others, asyncpg does
    not go on after every refusal, and both believe a pooler that tells old news of its server.
    """
    parts = _apart(url)
    options = _options(parts)
    login, at, hosts = parts.netloc.rpartition("@")
    if "hostaddr" in options or (hosts and {"host", "port"} & options.keys()):
        return [url]  # The drivers have their own rules for what overrides what.
    if hosts:
        each = [parts._replace(netloc=f"{login}{at}{host}") for host in hosts.split(",")]
        return [_with(_address(server), options) for server in each]
    names = options.get("host", "").split(",")
    ports = options.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(names)
    if len(ports) != len(names):
        return [url]  # The driver refuses it.
    made = []
    for name, port in zip(names, ports, strict=True):
        own = {"host": name, "port": port}
        asked = options | {key: value for key, value in own.items() if key in options}
        made.append(_with(_address(parts), asked))
    return made


def _check_servers(location: str, wanted: str) -> None:
    if wanted not in _WRITABLE_SERVERS:
        raise StoreUrlInvalid(
            f"{location}: target_session_attrs is one of {', '.join(_WRITABLE_SERVERS)}, because "
            f"every claim is a write, got {wanted!r}"
        )


def _apart(url: str) -> SplitResult:
    """As `urlsplit`, which takes only one host in some releases if one is in brackets."""
    scheme, slashes, rest = url.partition("://")
    netloc = re.split(r"[/?]", rest, maxsplit=1)[0]
    login, at, hosts = netloc.rpartition("@")
    first, *others = hosts.split(",")
    for host in others:
        urlsplit(f"//{host}")
    parts = urlsplit(f"{scheme}{slashes}{login}{at}{first}{rest[len(netloc) :]}")
    return parts._replace(netloc=",".join((parts.netloc, *others)))


def _keepalive(location: str, options: dict[str, str]) -> Keepalive:
    """What the URL says of it, by libpq's names; they stay in the URL, too."""
    wanted = {name: options[name] for name in KEEPALIVE_NAMES if name in options}
    for name, value in wanted.items():
        if not _WHOLE_NUMBER.fullmatch(value):
            raise StoreUrlInvalid(f"{location}: {name} is a whole number, 0 for the system's own")
    return Keepalive(**{name: int(value) for name, value in wanted.items()})


def _split(url: str) -> SplitResult:
    """The URL apart; raises `StoreUrlInvalid` where a driver would misread or refuse it."""
    shown = ascii(without_password(url).partition("?")[0])
    try:
        url.encode()
        # To libpq it is a letter like others.
        parts = _apart(url.replace("#", "%23"))
    except ValueError:
        # Its words may quote the password.
        raise StoreUrlInvalid(
            f"{shown} cannot be read: write postgresql://user@host/database, an IPv6 address in "
            "brackets, and other than letters and digits in a name or password as %XX"
        ) from None
    if _LONE_PERCENT.search(url) or "%00" in url or "\x00" in url:
        raise StoreUrlInvalid(
            f"{shown} has a % that begins no escape, or a NUL character: write a % in a name or "
            "password as %25"
        )
    # The drivers end the password at the first @, and libpq looks for it beyond a question mark.
    authority = url.partition("://")[2].partition("/")[0]
    beyond = authority.partition("?")[2]
    if authority.count("@") > 1 or "@" in beyond or any("@" in name for name in _options(parts)):
        raise StoreUrlInvalid(
            f"{shown} has an @ too many, or a password with a question mark: write an @ in a name "
            "or password as %40, and other than letters and digits as %XX"
        )
    hosts = parts.netloc.rpartition("@")[2].split(",")
    ports = [_port_of(host) for host in hosts]
    ports += _options(parts).get("port", "").split(",")
    for port in ports:
        number = _number(port) if port else 1
        if number is None or number > _PORT_LIMIT:
            raise StoreUrlInvalid(
                f"{shown}: a port is a number from 1 to {_PORT_LIMIT}; write an IPv6 address in "
                "brackets, and other than letters and digits in a password as %XX"
            )
    return parts


def _address(parts: SplitResult) -> str:
    # Not by `urlunsplit`: without a host it leaves out the slashes, which libpq looks for.
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _with(address: str, options: dict[str, str]) -> str:
    # libpq takes a plus for a plus, so a space must stay %20.
    query = urlencode(options, quote_via=quote)
    return f"{address}?{query}" if query else address


def _options(parts: SplitResult) -> dict[str, str]:
    return dict(parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True))


def _port_of(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[2].removeprefix(":")
    return unquote(host.partition(":")[2])


def _number(text: str) -> int | None:
    """A whole number from 1 up; None for anything else, and for what nobody can mean."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(_NUMBER_LIMIT)):
        return None
    return int(text) or None
