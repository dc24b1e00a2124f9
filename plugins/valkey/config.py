"""Options of the valkey tier: server URL, credentials and TLS."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from lmcache_async.config.files import read_secret_file
from lmcache_async.config.validation import disagree
from lmcache_async.config.values import (
    Count,
    Endpoint,
    Flag,
    Seconds,
    expand_home,
    parse_endpoint,
    parse_flag,
    parse_seconds,
    unless_none,
)
from lmcache_async.errors import ConfigError
from lmcache_async.tiers.base import TierConfig

TLS_SCHEMES = frozenset({"rediss", "valkeys"})
SENTINEL_SCHEMES = frozenset({"redis-sentinel", "valkey-sentinel"})
SCHEMES = frozenset({"redis", "valkey", "unix"}) | TLS_SCHEMES | SENTINEL_SCHEMES
PORT = 6379
SENTINEL_PORT = 26379
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def parse_file(value: object) -> Path | None:
    value = unless_none(value)
    if value is not None and not isinstance(value, str | Path):
        raise ValueError("expected the path of a file")
    return None if value is None else expand_home(value)


def check_variable(value: str) -> str:
    """Check the name of a variable. An invalid name may be the password itself, so no message shows it."""
    if value and not _VARIABLE.fullmatch(value):
        raise disagree("expected the name of a variable that holds the password", "")
    return value


OptionalFile = Annotated[Path | None, BeforeValidator(parse_file)]
Variable = Annotated[str, AfterValidator(check_variable)]


def parse_ttl(value: object) -> float | None:
    value = unless_none(value)
    return None if value is None else parse_seconds(value)


def parse_tls(value: object) -> bool | None:
    value = unless_none(value)
    return None if value is None else parse_flag(value)


def check_prefix(value: str) -> str:
    """Check the prefix of keys. With braces, all keys of a cluster would be on one node."""
    if "{" in value or "}" in value or not value.isprintable():
        raise ValueError("expected printable text without braces")
    return value


class ValkeyConfig(TierConfig):
    """Options of the valkey tier.

    Attributes:
        url: Servers and user: `valkey://host:6379`, `valkeys://` for TLS, `unix:///path`,
            `valkey-sentinel://host:26379,host:26379`; `redis` in place of `valkey` means the same. For a
            cluster some of its nodes.
        mode: `single`, `sentinel` or `cluster`; what the URL says if it is not given.
        sentinel_service: The name under which Sentinel knows the master.
        username: Of the ACL; "" is the default user.
        password_file: File of the password, closed to others.
        password_variable: Name of an environment variable that holds the password.
        sentinel_username: The same three for the Sentinels themselves.
        sentinel_password_file: See there.
        sentinel_password_variable: See there.
        tls: Whether connections are encrypted; what the URL says if it is not given.
        tls_ca_file: Certificates to trust, as PEM; the system's if it is not given.
        tls_cert_file: Our own certificate, as PEM, where the server asks for one.
        tls_key_file: Its key, unless that is in the same file.
        tls_check_hostname: Whether the certificate must be for the host that we connect to.
        key_prefix: What all our keys begin with.
        ttl_s: Seconds after which the server forgets a record; None keeps it until it is evicted.
        connections: Records read and written at the same time with one server; one connection more
            carries lookups.
        connect_timeout_s: Longest time to connect, in seconds, TLS and password included.
        lookup_timeout_s: Longest time of a lookup or a removal on one server, in seconds; connecting included.
        transfer_timeout_s: Longest time that one record is on its way, in seconds.
        node_pause_s: How long a node of a cluster that could not be reached or did not answer is not asked again.
    """

    url: str
    mode: Literal["single", "sentinel", "cluster"] | None = None
    sentinel_service: Annotated[str, Field(min_length=1)] = "mymaster"
    username: str = ""
    password_file: OptionalFile = None
    password_variable: Variable = ""
    sentinel_username: str = ""
    sentinel_password_file: OptionalFile = None
    sentinel_password_variable: Variable = ""
    tls: Annotated[bool | None, BeforeValidator(parse_tls)] = None
    tls_ca_file: OptionalFile = None
    tls_cert_file: OptionalFile = None
    tls_key_file: OptionalFile = None
    tls_check_hostname: Flag = True
    key_prefix: Annotated[str, AfterValidator(check_prefix)] = "lmcache-async:"
    ttl_s: Annotated[float | None, BeforeValidator(parse_ttl)] = None
    connections: Annotated[Count, Field(le=64)] = 4
    connect_timeout_s: Seconds = 0.5
    lookup_timeout_s: Seconds = 0.8
    transfer_timeout_s: Seconds = 10.0
    node_pause_s: Seconds = 1.0

    @property
    def address(self) -> Address:
        return parse_url(self.url)

    @property
    def how(self) -> Literal["single", "sentinel", "cluster"]:
        """The mode; by default according to the URL."""
        if self.mode is None:
            return "sentinel" if self.address.scheme in SENTINEL_SCHEMES else "single"
        return self.mode

    @property
    def encrypted(self) -> bool:
        return self.address.scheme in TLS_SCHEMES if self.tls is None else self.tls

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        try:
            address = parse_url(self.url)
        except ValueError as error:  # not as pydantic's error, whose message shows the URL
            raise disagree(str(error), "url") from None
        if address.scheme in SENTINEL_SCHEMES and self.how != "sentinel":
            raise disagree(f"the URL names Sentinels, but mode is {self.mode}", "mode", "url")
        if self.how != "single" and address.scheme == "unix":
            raise disagree(
                f"mode {self.how} has several servers, and a Unix socket leads to one", "mode", "url"
            )
        if self.how == "single" and len(address.endpoints) > 1:
            raise disagree("several hosts need mode: cluster or mode: sentinel", "url", "mode")
        if self.how == "cluster" and address.database:
            raise disagree("a cluster has the database 0 alone", "url", "mode")
        if address.scheme in TLS_SCHEMES and self.tls is False:
            raise disagree("the URL asks for TLS, but tls is false", "tls", "url")
        files = {"ca": self.tls_ca_file, "cert": self.tls_cert_file, "key": self.tls_key_file}
        if not self.encrypted and (unused := [kind for kind, file in files.items() if file is not None]):
            raise disagree(
                "it has no effect without TLS: set tls to true, or use a valkeys:// URL",
                *(f"tls_{kind}_file" for kind in unused),
            )
        if address.username and self.username not in {"", address.username}:
            raise disagree("username and the URL name different users", "username", "url")
        for prefix in ("", "sentinel_"):
            if getattr(self, f"{prefix}password_file") and getattr(self, f"{prefix}password_variable"):
                names = (f"{prefix}password_variable", f"{prefix}password_file")
                raise disagree(
                    f"{names[0]} and {names[1]} are both set; one of them is enough", names[1], names[0]
                )
        return self


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server URL.

    Attributes:
        endpoints: Hosts or a socket, at least one.
        username: "" if the URL has none.
        database: Number of the database.
    """

    scheme: str
    endpoints: tuple[Endpoint, ...]
    username: str = ""
    database: int = 0


def parse_url(text: str) -> Address:
    """Parse a server URL.

    Raises:
        ValueError: It is not a URL of this tier. The message shows neither user nor password.
    """
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise ValueError(
            "expected a URL such as valkey://host:6379, valkeys://host:6379 (TLS), unix:///run/valkey.sock"
            " or valkey-sentinel://host:26379,host:26379"
        )
    # urlsplit does not accept several hosts, so the rest of the URL is parsed without them.
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


class Credentials:
    """A user and a password, which no repr shows."""

    def __init__(self, username: str, password: SecretStr | None) -> None:
        self.username = username
        self._password = password

    @classmethod
    def read(cls, username: str, file: Path | None, variable: str, prefix: str = "") -> Self:
        """Read the password from the file or the variable, if one is given.

        Args:
            username: "" is the default user.
            file: The option `password_file`.
            variable: The option `password_variable`.
            prefix: Prefix of the option names in messages.

        Raises:
            ConfigError: The file or the variable does not exist, or the file is open to others.
        """
        password: str | None = None
        if file is not None:
            password = read_password(file, f"{prefix}password_file")
        elif variable:
            password = os.environ.get(variable)
            if not password:
                raise ConfigError(f"{prefix}password_variable: the variable {variable} is not set")
        elif username:
            raise ConfigError(
                f"{prefix}username is {username!r} without a password: set {prefix}password_file or"
                f" {prefix}password_variable"
            )
        return cls(username, None if password is None else SecretStr(password))

    @property
    def command(self) -> tuple[bytes, ...]:
        """The AUTH command; empty without a password."""
        if self._password is None:
            return ()
        password = self._password.get_secret_value().encode()
        return (b"AUTH", self.username.encode(), password) if self.username else (b"AUTH", password)


def make_client_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, check_hostname: bool
) -> ssl.SSLContext:
    """Create the TLS context from the options `tls_ca_file` and so on. Reads files.

    Raises:
        ConfigError: A file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca_file: {ca_file} cannot be used: {error}") from error
    context.check_hostname = check_hostname
    if cert_file is not None:
        try:
            context.load_cert_chain(cert_file, key_file)
        except (OSError, ssl.SSLError) as error:
            names = f"tls_cert_file: {cert_file}, tls_key_file: {key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
    return context


def read_password(file: Path, name: str) -> str:
    """Read a password from a file, without the line end.

    Args:
        file: The file.
        name: Name of the option in messages.

    Raises:
        ConfigError: It cannot be read, is open to others, or is empty.
    """
    password = read_secret_file(file, name).decode("utf-8", "replace").rstrip("\r\n")
    if not password:
        raise ConfigError(f"{name}: {file} is empty")
    return password


def read_credentials(config: ValkeyConfig, prefix: str = "") -> Credentials:
    """Read the credentials for the server, or with the prefix `sentinel_` for the Sentinels.

    Raises:
        ConfigError: The file or the variable does not exist, or the file is open to others.
    """
    values: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    username = values[f"{prefix}username"] or ("" if prefix else config.address.username)
    return Credentials.read(
        username, values[f"{prefix}password_file"], values[f"{prefix}password_variable"], prefix
    )


def make_tls_context(config: ValkeyConfig) -> ssl.SSLContext | None:
    """Create the TLS context; None for connections without encryption. Reads files.

    Raises:
        ConfigError: A file cannot be used.
    """
    if not config.encrypted:
        return None
    return make_client_context(
        config.tls_ca_file,
        config.tls_cert_file,
        config.tls_key_file,
        check_hostname=config.tls_check_hostname,
    )
