"""The URL that names servers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from lmcache_async.config.endpoint import Endpoint, parse_endpoint

TLS_SCHEMES = frozenset({"rediss", "valkeys"})
SENTINEL_SCHEMES = frozenset({"redis-sentinel", "valkey-sentinel"})
SCHEMES = frozenset({"redis", "valkey", "unix"}) | TLS_SCHEMES | SENTINEL_SCHEMES
PORT = 6379
SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says.

    Attributes:
        endpoints: At least one.
        username: "" where it names none.
        database: Its number.
    """

    scheme: str
    endpoints: tuple[Endpoint, ...]
    username: str = ""
    database: int = 0


def parse_url(text: str) -> Address:
    """Read the URL.

    Raises:
        ValueError: It is none of ours. The message shows neither user nor password.
    """
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise ValueError(
            "expected a URL such as valkey://host:6379, valkeys://host:6379 (TLS), unix:///run/valkey.sock"
            " or valkey-sentinel://host:26379,host:26379"
        )
    # Several hosts are no URL that the library knows: what is before and after them is read with the first.
    authority, slash, tail = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    if ":" in userinfo:
        raise ValueError(
            "expected no password in the URL, which others read and log: name a file with password_file,"
            " or a variable with password_variable"
        )
    try:
        parts = urlsplit(f"x://{slash}{tail}")
    except ValueError:
        parts = SplitResult("x", "", "\0", "", "")  # refused below
    if scheme == "unix":
        return Address(scheme, (_socket(hosts, parts),), unquote(userinfo), _database(parts, ""))
    port = SENTINEL_PORT if scheme in SENTINEL_SCHEMES else PORT
    endpoints = tuple(dict.fromkeys(_endpoint(host, port) for host in hosts.split(",")))
    return Address(scheme, endpoints, unquote(userinfo), _database(parts, parts.path))


def _socket(hosts: str, parts: SplitResult) -> Endpoint:
    path = unquote(parts.path)
    if hosts or len(path) < 2 or "\0" in path:
        raise ValueError("expected a socket's path after unix://, such as unix:///run/valkey.sock")
    return Endpoint(path=path)


def _endpoint(text: str, port: int) -> Endpoint:
    try:
        return parse_endpoint(text, port)
    except ValueError as error:
        raise ValueError(f"{error} for each host, with commas between several") from None


def _database(parts: SplitResult, path: str) -> int:
    query = parse_qs(parts.query)
    number = path.strip("/") or "".join(query.get("db", [])) or "0"
    if set(query) - {"db"} or parts.fragment or not (number.isascii() and number.isdigit()):
        raise ValueError("expected the number of a database at most after the host, such as valkey://host/2")
    return int(number)
