"""Who may read: tokens, and the names under which a loopback server is asked for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from lmcache_async.config.files import read_secret_file
from lmcache_async.config.values import is_loopback
from lmcache_async.errors import ConfigError

MIN_TOKEN_CHARACTERS = 16
_OPTION = "http.token_file"


class Tokens:
    """What a reader must say one of; no repr shows one.

    Args:
        digests: SHA-256 of each; empty where nobody has to say any.
    """

    def __init__(self, digests: Sequence[bytes] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def read(cls, file: Path | None) -> Self:
        """One token a line; lines that begin with # say nothing.

        Raises:
            ConfigError: The file cannot be used. No message shows a token.
        """
        if file is None:
            return cls()
        digests = []
        for number, line in enumerate(
            read_secret_file(file, _OPTION).decode("utf-8", "replace").splitlines(), 1
        ):
            token = line.strip()
            if not token or token.startswith("#"):
                continue
            if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or " " in token:
                raise ConfigError(
                    f"{_OPTION}: {file}, line {number}: a token has at least {MIN_TOKEN_CHARACTERS} characters,"
                    " all of ASCII and none a space"
                )
            digests.append(_digest(token))
        if not digests:
            raise ConfigError(f"{_OPTION}: {file} holds no token; make one with: openssl rand -hex 32")
        return cls(digests)

    def allow(self, authorization: str) -> bool:
        """Whether a request with this header may read: `Bearer TOKEN`, or `Basic` with it as password."""
        if not self._digests:
            return True
        said = _digest(_token_of(authorization))
        right = [hmac.compare_digest(said, known) for known in self._digests]  # all, whichever it is
        return any(right)


def is_loopback_name(host_header: str) -> bool:
    """Whether a request for this host was meant for the loopback.

    A page of another site, whose name its owner lets point here, would say that name: DNS rebinding.
    """
    try:
        name = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    return name is not None and (is_loopback(name) or name.endswith(".localhost"))


def _token_of(authorization: str) -> str:
    scheme, _, said = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return said.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(said.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
