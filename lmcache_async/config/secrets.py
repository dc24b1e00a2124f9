"""Secret keys from files or variables. They are never in a configuration file, a message, a repr or a dump."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SecretStr

from lmcache_async.config.files import read_secret_file
from lmcache_async.config.validation import KeyPath, disagree
from lmcache_async.config.values import unless_none
from lmcache_async.errors import ConfigError

SECRET_BYTES = 32
SECRET_PATHS: Mapping[KeyPath, str] = {
    ("hash_key",): "hash_key_file",
    ("encryption", "keys"): "encryption.key_file",
}
"""Keys whose value is a secret, and the key that names a file instead."""

_FORM = f"{SECRET_BYTES} bytes as 64 hex digits or as base64; make one with: openssl rand -hex {SECRET_BYTES}"


SecretText = Annotated[SecretStr | None, BeforeValidator(unless_none)]


def check_one_source(text: SecretStr | None, file: Path | None, text_name: str, file_name: str) -> None:
    if text is not None and file is not None:
        raise disagree(
            f"{text_name} and {file_name} are both set; one of them is enough", file_name, text_name
        )


def read_secrets(
    text: SecretStr | None, file: Path | None, text_name: str, file_name: str
) -> tuple[bytes, ...]:
    """Return the keys of the text or of the file, in order; none if neither is given. No message contains a key."""
    if text is not None:
        return _parse_keys(text.get_secret_value(), text_name)
    if file is None:
        return ()
    content = read_secret_file(file, file_name).decode("ascii", "replace")
    return _parse_keys(content, f"{file_name}: {file}")


def _parse_keys(text: str, where: str) -> tuple[bytes, ...]:
    words = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace(",", " ").split()
    if not words:
        raise ConfigError(f"{where}: there is no key; expected {_FORM}")
    keys = tuple(_parse_key(word, f"{where}: key {number}") for number, word in enumerate(words, 1))
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{where}: the same key is given twice")
    return keys


def _parse_key(word: str, where: str) -> bytes:
    key = b""
    if re.fullmatch(r"[0-9a-fA-F]{64}", word):
        key = bytes.fromhex(word)
    elif re.fullmatch(r"[A-Za-z0-9+/_-]{43}=?", word):
        key = base64.urlsafe_b64decode(word.rstrip("=").replace("+", "-").replace("/", "_") + "=")
    if len(key) != SECRET_BYTES:
        raise ConfigError(f"{where} has {len(word)} characters; expected {_FORM}")
    if len(set(key)) == 1:
        raise ConfigError(
            f"{where} is one byte repeated {SECRET_BYTES} times, which is not a secret; expected {_FORM}"
        )
    return key
