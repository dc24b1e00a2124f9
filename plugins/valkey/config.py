"""Options of the valkey tier: server URL, credentials and TLS."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qs, unquote

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lmcache_async.config.files import load_certificate, read_secret_file
from lmcache_async.config.validation import disagree
from lmcache_async.config.values import (
    Count,
    Endpoint,
    Flag,
    OptionalPath,
    OptionalSeconds,
    Seconds,
    parse_endpoint,
    unless_none,
)
from lmcache_async.errors import ConfigError
from lmcache_async.tiers.base import TierConfig

TLS_SCHEMES = frozenset({"rediss", "valkeys"})
SENTINEL_SCHEMES = frozenset({"redis-sentinel", "valkey-sentinel"})
SCHEMES = frozenset({"redis", "valkey", "unix"}) | TLS_SCHEMES | SENTINEL_SCHEMES
PORT = 6379
SENTINEL_PORT = 26379
MAX_SOCKET_PATH_BYTES = 107
"""Limit of the kernel. uvloop cuts a longer path off instead of refusing it."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def check_variable(value: str) -> str:
    """Check the name of a variable. No message contains the value, because it may be the password itself."""
    if value and not _VARIABLE.fullmatch(value):
        raise disagree("expected the name of an environment variable, which contains the password", "")
    return value


Variable = Annotated[str, AfterValidator(check_variable)]


def check_prefix(value: str) -> str:
    """Check the prefix of keys. With braces, all keys of a cluster would be on one node."""
    if "{" in value or "}" in value or not value.isprintable():
        raise ValueError("expected printable text without braces")
    return value


class ValkeyConfig(TierConfig):
    """Options of the valkey tier.

    Attributes:
        url: Servers and user: `valkey://host:6379`, `valkeys://` for TLS, `unix:///path`,
            `valkey-sentinel://host:26379,host:26379`; `redis` is accepted in place of `valkey`. For a cluster,
            one or more of its nodes.
        mode: `single`, `sentinel` or `cluster`; by default according to the URL.
        sentinel_service: Name of the master at the Sentinels.
        username: ACL user; "" is the default user.
        password_file: File of the password, not readable by other users.
        password_variable: Name of an environment variable that contains the password.
        sentinel_username: ACL user of the Sentinels.
        sentinel_password_file: File of the password of the Sentinels.
        sentinel_password_variable: Name of an environment variable that contains the password of the Sentinels.
        tls: Whether connections are encrypted; by default according to the URL.
        tls_ca_file: Certificates to trust, as PEM; by default those of the system.
        tls_cert_file: Client certificate, as PEM, if the server requires one.
        tls_key_file: Key of the client certificate, if it is in another file.
        tls_check_hostname: Whether the certificate of the server must match the host of the URL.
        key_prefix: Prefix of all keys.
        ttl_s: Seconds after which the server deletes a record; None keeps it until it is evicted.
        connections: Number of records transferred concurrently with one server. Lookups use one further
            connection.
        connect_timeout_s: Longest time to connect and authenticate, in seconds.
        lookup_timeout_s: Longest time of a lookup or a removal on one server, in seconds, with the connection.
        transfer_timeout_s: Longest time to transfer one record, in seconds.
        node_pause_s: Seconds during which a failed node of a cluster is not contacted.
    """

    url: str = Field(examples=["valkey://localhost:6379"])
    mode: Literal["single", "sentinel", "cluster"] | None = None
    sentinel_service: Annotated[str, Field(min_length=1)] = "mymaster"
    username: str = ""
    password_file: OptionalPath = None
    password_variable: Variable = ""
    sentinel_username: str = ""
    sentinel_password_file: OptionalPath = None
    sentinel_password_variable: Variable = ""
    tls: Annotated[Flag | None, BeforeValidator(unless_none)] = None
    tls_ca_file: OptionalPath = None
    tls_cert_file: OptionalPath = None
    tls_key_file: OptionalPath = None
    tls_check_hostname: Flag = True
    key_prefix: Annotated[str, AfterValidator(check_prefix)] = "lmcache-async:"
    ttl_s: OptionalSeconds = None
    connections: Annotated[Count, Field(le=64)] = 4
    connect_timeout_s: Seconds = 0.5
    lookup_timeout_s: Seconds = 0.8
    transfer_timeout_s: Seconds = 10.0
    node_pause_s: Seconds = 1.0

    @property
    def address(self) -> Address:
        return parse_url(self.url)

    @property
    def effective_mode(self) -> Literal["single", "sentinel", "cluster"]:
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
        if address.scheme in SENTINEL_SCHEMES and self.effective_mode != "sentinel":
            raise disagree(f"the URL is of Sentinels, but mode is {self.mode}", "mode", "url")
        if self.effective_mode != "single" and address.scheme == "unix":
            raise disagree(
                f"mode is {self.effective_mode}, but the URL is a Unix socket: use mode single", "mode", "url"
            )
        if self.effective_mode == "single" and len(address.endpoints) > 1:
            raise disagree("the URL has several hosts: set mode to cluster or sentinel", "url", "mode")
        if self.effective_mode == "cluster" and address.database:
            raise disagree("the URL selects a database, but a cluster has only database 0", "url", "mode")
        if address.scheme in TLS_SCHEMES and self.tls is False:
            raise disagree("the URL selects TLS, but tls is false", "tls", "url")
        files = {"ca": self.tls_ca_file, "cert": self.tls_cert_file, "key": self.tls_key_file}
        if not self.encrypted and (unused := [kind for kind, file in files.items() if file is not None]):
            raise disagree(
                "it has no effect without TLS: set tls to true, or use a valkeys:// URL",
                *(f"tls_{kind}_file" for kind in unused),
            )
        if address.username and self.username not in {"", address.username}:
            raise disagree("username and the URL contain different users", "username", "url")
        for prefix in ("", "sentinel_"):
            file, variable = f"{prefix}password_file", f"{prefix}password_variable"
            if getattr(self, file) and getattr(self, variable):
                raise disagree(f"{variable} and {file} are both set; one of them is enough", file, variable)
        return self


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server URL.

    Attributes:
        endpoints: Hosts or a socket, at least one.
    """

    scheme: str
    endpoints: tuple[Endpoint, ...]
    username: str
    database: int


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
    authority, slash, tail = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    if ":" in userinfo:
        raise ValueError(
            "expected no password in the URL, because URLs are logged: set password_file or password_variable"
        )
    path, _, query = f"{slash}{tail}".partition("?")
    if scheme == "unix":
        path = unquote(path)
        if hosts or len(path) < 2 or "\0" in path:
            raise ValueError("expected the path of a socket after unix://, such as unix:///run/valkey.sock")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"expected a path of at most {MAX_SOCKET_PATH_BYTES} bytes, the limit of sockets"
            )
        endpoints: tuple[Endpoint, ...] = (Endpoint(path=path),)
        number = ""
    else:
        port = SENTINEL_PORT if scheme in SENTINEL_SCHEMES else PORT
        endpoints = tuple(dict.fromkeys(_parse_host(host, port) for host in hosts.split(",")))
        number = path.strip("/")
    options = parse_qs(query, keep_blank_values=True)
    numbers = ([number] if number else []) + options.pop("db", []) or ["0"]
    number = numbers[0]
    if options or len(numbers) > 1 or "#" in tail or not (number.isascii() and number.isdigit()):
        raise ValueError(
            "expected nothing after the host but the number of a database, such as valkey://host/2"
        )
    return Address(scheme, endpoints, unquote(userinfo), int(number))


def _parse_host(text: str, port: int) -> Endpoint:
    try:
        endpoint = parse_endpoint(text, port)
    except ValueError as error:
        raise ValueError(f"{error} for each host, separated by commas") from None
    if not endpoint.port:
        raise ValueError("expected a port above 0 for each host")
    return endpoint


def read_auth(config: ValkeyConfig, prefix: Literal["", "sentinel_"] = "") -> tuple[bytes, ...]:
    """Return the AUTH command for the user and the password in the options with this prefix.

    The command is empty if neither a user nor a password is set.

    Raises:
        ConfigError: The file or the variable does not exist or is empty, the file can be read by other users, or a user
            is set without a password.
    """
    username: str = getattr(config, f"{prefix}username") or ("" if prefix else config.address.username)
    file: Path | None = getattr(config, f"{prefix}password_file")
    variable: str = getattr(config, f"{prefix}password_variable")
    if file is not None:
        password = read_secret_file(file, f"{prefix}password_file").decode("utf-8", "replace").rstrip("\r\n")
        if not password:
            raise ConfigError(f"{prefix}password_file: {file} is empty")
    elif variable:
        password = os.environ.get(variable, "").rstrip("\r\n")
        if not password:
            raise ConfigError(f"{prefix}password_variable: the variable {variable} is not set")
    elif username:
        raise ConfigError(
            f"{prefix}username is {username!r} without a password: set {prefix}password_file or"
            f" {prefix}password_variable"
        )
    else:
        return ()
    return (b"AUTH", *([username.encode()] if username else []), password.encode())


def make_tls_context(config: ValkeyConfig) -> ssl.SSLContext | None:
    """Create the TLS context; None for connections without encryption. Reads files."""
    if not config.encrypted:
        return None
    ca_file, cert_file, key_file = config.tls_ca_file, config.tls_cert_file, config.tls_key_file
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"tls_ca_file: {ca_file} cannot be used: {error}") from error
    context.check_hostname = config.tls_check_hostname
    if cert_file is not None:
        try:
            load_certificate(context, cert_file, key_file)
        except OSError as error:
            raise ConfigError(
                f"tls_cert_file: {cert_file} with tls_key_file {key_file} cannot be used: {error}"
            ) from error
    return context
