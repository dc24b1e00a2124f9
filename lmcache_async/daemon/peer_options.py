"""Options of what the daemon serves to other hosts, and the files that they name."""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from lmcache_async.config.endpoint import Endpoint, is_loopback, parse_listen
from lmcache_async.config.explain import disagree
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.values import Count, Flag, Seconds, parse_name
from lmcache_async.errors import ConfigError
from lmcache_async.resp.access import OptionalFile, parse_file

DEFAULT_USER = "default"
"""Who says no name; with no tokens everybody is."""
MIN_TOKEN_CHARACTERS = 16


class PeerTLSOptions(BaseModel):
    """Encryption of connections of peers.

    Attributes:
        cert_file: Our certificate, as PEM.
        key_file: Its key, unless that is in the same file.
        client_ca_file: Who must have signed a peer's certificate; without it peers need none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert_file: Annotated[Path, BeforeValidator(parse_file)]
    key_file: OptionalFile = None
    client_ca_file: OptionalFile = None

    def make_context(self) -> ssl.SSLContext:
        """Reads the files.

        Raises:
            ConfigError: One of them cannot be used.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            names = f"peer.tls.cert_file: {self.cert_file}, peer.tls.key_file: {self.key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                name = f"peer.tls.client_ca_file: {self.client_ca_file}"
                raise ConfigError(f"{name}: it cannot be used: {error}") from error
        return context


class PeerOptions(BaseModel):
    """What is served to other hosts, and to whom.

    Attributes:
        listen: Where, as host:port.
        tls: Encryption; without it what is sent can be read on the way, tokens too.
        token_file: File of the tenants' tokens, closed to others; may be left out on the loopback alone.
        writable: Whether peers may put and remove records.
        max_connections: Connections at the same time; one more is told so and closed.
        transfer_timeout_s: Longest time for one record to be sent or received. One that is not read in that
            time ends its connection.
        idle_timeout_s: A connection that asks nothing for so long is closed.
        greeting_timeout_s: Longest time for a new connection to say its token, TLS included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[Endpoint, BeforeValidator(parse_listen, json_schema_input_type=str)]
    tls: PeerTLSOptions | None = None
    token_file: OptionalFile = None
    writable: Flag = False
    max_connections: Count = 64
    transfer_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds = 600.0
    greeting_timeout_s: Seconds = 5.0

    def check_files(self) -> Iterator[str]:
        """Read the files that are named; a line for each that cannot be used."""
        tls = () if self.tls is None else (self.tls.make_context,)
        for read in (partial(Tokens.read, self.token_file), *tls):
            try:
                read()
            except ConfigError as error:
                yield str(error)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.token_file is None and not is_loopback(self.listen.host):
            raise disagree(
                f"{self.listen} can be reached from elsewhere, and nobody would have to say a token:"
                " set token_file, or listen at 127.0.0.1",
                "token_file",
                "listen",
            )
        return self


class Tokens:
    """Which user has which tokens; no repr shows one. A user is a tenant.

    Args:
        digests: By user, the SHA-256 of each token; empty where nobody has to say one.
    """

    def __init__(self, digests: Mapping[str, tuple[bytes, ...]]) -> None:
        self._digests = dict(digests)

    @classmethod
    def read(cls, file: Path | None) -> Self:
        """Lines of `tenant token`, or `token` alone for the tenant `default`; several of one tenant all count.

        Raises:
            ConfigError: The file cannot be used. No message shows a token.
        """
        if file is None:
            return cls({})
        digests: dict[str, tuple[bytes, ...]] = {}
        text = read_secret_file(file, "peer.token_file").decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            words = re.sub(r"^\s*#.*", "", line).split()
            if not words:
                continue
            where = f"peer.token_file: {file}, line {number}"
            if len(words) > 2:
                raise ConfigError(f"{where}: expected a tenant and a token, or a token alone")
            if len(words[-1]) < MIN_TOKEN_CHARACTERS:
                raise ConfigError(f"{where}: a token has at least {MIN_TOKEN_CHARACTERS} characters")
            user = _tenant(words[0], where) if len(words) == 2 else DEFAULT_USER
            digests[user] = (*digests.get(user, ()), _digest(words[-1].encode()))
        if not digests:
            raise ConfigError(f"peer.token_file: {file} holds no token; make one with: openssl rand -hex 32")
        return cls(digests)

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, user: bytes, token: bytes) -> str | None:
        """Whose records this user sees; None where the token is not the user's."""
        name = user.decode("utf-8", "replace")
        said = _digest(token)
        right = [hmac.compare_digest(said, known) for known in self._digests.get(name, (bytes(32),))]
        return name if any(right) else None


def _tenant(text: str, where: str) -> str:
    try:
        return parse_name(text)
    except ValueError as error:
        raise ConfigError(f"{where}: the tenant: {error}") from None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
