"""Reads status.json; whatever is in the way becomes one sentence."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmcache_async.config.files import read_secret_file
from lmcache_async.errors import ConfigError

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
"""More than that no status page says."""


class StatusError(Exception):
    """There is nothing to show, and why.

    Attributes:
        refused: It will be so again until somebody changes something.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class StatusClient:
    """Reads one endpoint. Proxies of the environment are not used.

    Args:
        url: With or without `http://` and a path.
        token: Said if it is there.
        token_file: It is read from there.

    Raises:
        StatusError: The address or the file cannot be used.
    """

    def __init__(self, url: str, *, token: str = "", token_file: Path | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
        except ValueError:
            raise _wrong(url) from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise _wrong(url)
        self._encrypted, self._host = parts.scheme == "https", parts.hostname
        folder = parts.path if parts.path.endswith("/") else parts.path.rpartition("/")[0] + "/"
        self._path = f"{folder}status.json"
        self._token = _from_file(token_file) if token_file is not None else token.strip()
        if not (self._token.isascii() and self._token.isprintable()):
            raise StatusError("the token has characters that no token has", refused=True)

    def read(self) -> dict[str, Any]:
        """What is told now.

        Raises:
            StatusError: There is no answer, or none that can be read.
        """
        try:
            status, content = self._get()
        except ssl.SSLCertVerificationError as error:
            text = f"{self.url}: its certificate cannot be trusted ({error.verify_message}); SSL_CERT_FILE may name one"
            raise StatusError(text, refused=True) from None
        except TimeoutError:
            raise StatusError(f"{self.url} gave no answer in {TIMEOUT_S:.0f} s") from None
        except OSError as error:
            text = f"nothing answers at {self.url}: {error.strerror or error}; is http.listen set there?"
            raise StatusError(text) from None
        except http.client.HTTPException as error:
            raise StatusError(f"{self.url} does not speak HTTP: {error!r}", refused=True) from None
        if status in {401, 403}:
            how = "LMCACHE_ASYNC_TOKEN or --token-file gives one"
            said = "another token" if self._token else "a token"
            raise StatusError(f"{self.url} wants {said}: {how}", refused=True)
        if status != 200:
            raise StatusError(f"{self.url} answered {status}; it is no status page", refused=status < 500)
        try:
            told = json.loads(content)
        except ValueError:
            told = None
        if not isinstance(told, dict) or told.get("kind") not in {"engine", "daemon"}:
            raise StatusError(f"{self.url} is no status page of lmcache-async", refused=True)
        return told

    def _get(self) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=TIMEOUT_S)
        try:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request("GET", self._path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_BYTES)
        finally:
            connection.close()


def _wrong(url: str) -> StatusError:
    return StatusError(f"{url}: expected an address such as http://127.0.0.1:7421", refused=True)


def _from_file(file: Path) -> str:
    try:
        text = read_secret_file(file, "--token-file").decode("utf-8", "replace")
    except ConfigError as error:
        raise StatusError(str(error), refused=True) from None
    lines = [line.strip() for line in text.splitlines()]
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token:
        raise StatusError(f"--token-file: {file} holds no token", refused=True)
    return token
