"""Options of the peer tier."""

from __future__ import annotations

import ssl
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lmcache_async.config.endpoint import Endpoint, parse_endpoint
from lmcache_async.config.explain import disagree
from lmcache_async.config.values import Count, Flag, Seconds, parse_list
from lmcache_async.resp.access import OptionalFile, Variable, make_client_context
from lmcache_async.tiers.base import TierConfig

MAX_PEERS = 64


def parse_peers(value: object) -> tuple[Endpoint, ...]:
    """Endpoints, each once; a lookup asks all of them, so there are not too many."""
    items = parse_list(value)
    if not all(isinstance(item, str) for item in items):
        raise ValueError("expected a list of host:port")
    peers = tuple(dict.fromkeys(parse_endpoint(item) for item in items))
    if not 1 <= len(peers) <= MAX_PEERS:
        raise ValueError(f"expected 1 to {MAX_PEERS} peers as host:port")
    return peers


class PeerConfig(TierConfig):
    """Options of the peer tier.

    Attributes:
        peers: The daemons of other hosts, as host:port.
        write_to: `none`: records are only read. `rendezvous`: each record is put to one of the peers, which
            the key chooses; the daemons must have `peer.writable`.
        username: The tenant whose records are seen; "" is `default`.
        password_file: File of its token, closed to others.
        password_variable: Name of an environment variable that holds the token.
        tls: Whether connections are encrypted.
        tls_ca_file: Certificates to trust, as PEM; the system's if it is not given.
        tls_cert_file: Our own certificate, as PEM, where the daemons ask for one.
        tls_key_file: Its key, unless that is in the same file.
        tls_check_hostname: Whether the certificate must be for the host that we connect to.
        connections: Records read and written at the same time with one peer; one connection more carries lookups.
        connect_timeout_s: Longest time to connect, in seconds, TLS and token included.
        lookup_timeout_s: Longest time of a lookup or a removal on one peer, in seconds; connecting included.
        transfer_timeout_s: Longest time that one record is on its way, in seconds.
        retry_s: A peer that was lost is tried again, in the background, after so many seconds, and then less
            and less often.
        remember_s: For how long it is known which peer has a key, in seconds.
        remember_keys: Of how many keys.
    """

    peers: Annotated[
        tuple[Endpoint, ...], BeforeValidator(parse_peers, json_schema_input_type=list[str] | str)
    ]
    write_to: Literal["none", "rendezvous"] = "none"
    username: str = ""
    password_file: OptionalFile = None
    password_variable: Variable = ""
    tls: Flag = False
    tls_ca_file: OptionalFile = None
    tls_cert_file: OptionalFile = None
    tls_key_file: OptionalFile = None
    tls_check_hostname: Flag = True
    connections: Annotated[Count, Field(le=64)] = 4
    connect_timeout_s: Seconds = 0.5
    lookup_timeout_s: Seconds = 0.8
    transfer_timeout_s: Seconds = 10.0
    retry_s: Seconds = 1.0
    remember_s: Seconds = 30.0
    remember_keys: Count = 100_000

    def make_tls_context(self) -> ssl.SSLContext | None:
        """None where connections are not encrypted. Reads files.

        Raises:
            ConfigError: A file cannot be used.
        """
        if not self.tls:
            return None
        return make_client_context(
            self.tls_ca_file, self.tls_cert_file, self.tls_key_file, check_hostname=self.tls_check_hostname
        )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.password_file is not None and self.password_variable:
            raise disagree(
                "password_variable and password_file are both set; one of them is enough",
                "password_file",
                "password_variable",
            )
        if not self.tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            raise disagree(
                "files for TLS are given, but tls is false",
                "tls",
                "tls_ca_file",
                "tls_cert_file",
                "tls_key_file",
            )
        return self
