"""Options of the valkey tier."""

from __future__ import annotations

import ssl
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lmcache_async.config.explain import disagree
from lmcache_async.config.values import Count, Flag, Seconds, parse_flag, parse_seconds, unless_none
from lmcache_async.plugins.valkey.address import SENTINEL_SCHEMES, TLS_SCHEMES, Address, parse_url
from lmcache_async.resp.access import Credentials, OptionalFile, Variable, make_client_context
from lmcache_async.tiers.base import TierConfig


def parse_ttl(value: object) -> float | None:
    value = unless_none(value)
    return None if value is None else parse_seconds(value)


def parse_tls(value: object) -> bool | None:
    value = unless_none(value)
    return None if value is None else parse_flag(value)


def check_prefix(value: str) -> str:
    """Braces would put all keys of a cluster onto one node."""
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
        """The mode, by the URL where it is not given."""
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
        if address.username and self.username not in {"", address.username}:
            raise disagree("username and the URL name different users", "username", "url")
        for prefix in ("", "sentinel_"):
            if getattr(self, f"{prefix}password_file") and getattr(self, f"{prefix}password_variable"):
                names = (f"{prefix}password_variable", f"{prefix}password_file")
                raise disagree(
                    f"{names[0]} and {names[1]} are both set; one of them is enough", names[1], names[0]
                )
        return self


def read_credentials(config: ValkeyConfig, prefix: str = "") -> Credentials:
    """The server's, or with the prefix `sentinel_` the Sentinels'.

    Raises:
        ConfigError: The file or the variable is not there, or the file is open to others.
    """
    values: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    username = values[f"{prefix}username"] or ("" if prefix else config.address.username)
    return Credentials.read(
        username, values[f"{prefix}password_file"], values[f"{prefix}password_variable"], prefix
    )


def make_tls_context(config: ValkeyConfig) -> ssl.SSLContext | None:
    """None where connections are not encrypted. Reads files.

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
