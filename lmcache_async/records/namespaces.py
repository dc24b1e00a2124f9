"""Namespaces as people name them: by a short id, or by what is in them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_async.errors import ConfigError

ID_DIGITS = 12
MIN_DIGITS = 4
_ENCRYPTED = "encrypted:"


def namespace_id(text: str) -> str:
    """Short, and the same everywhere."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:ID_DIGITS]


def encrypted_text(key_id: str) -> str:
    """What stands for the namespace of records whose header is secret."""
    return _ENCRYPTED + key_id


def is_encrypted_text(text: str) -> bool:
    return text.startswith(_ENCRYPTED)


def fields_of(text: str) -> Mapping[str, Any]:
    """The namespace's names and values; none where the text is not what engines make."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def title_of(text: str) -> str:
    """The namespace in a few words: model and rank."""
    if is_encrypted_text(text):
        return f"encrypted with key {text.removeprefix(_ENCRYPTED)}"
    fields = fields_of(text)
    words = [str(fields.get("model", text[:40] or "unreadable"))]
    for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
        if fields.get(size, 1) != 1:
            words.append(f"{rank[:2]} {fields.get(rank)}/{fields.get(size)}")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which namespaces are meant; none named means all, and what cannot be read too.

    Attributes:
        patterns: Each the start of an id, `encrypted`, or `field=value`; one that fits is enough.
    """

    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            is_id = len(pattern) >= MIN_DIGITS and all(digit in "0123456789abcdef" for digit in pattern)
            if not (is_id or pattern == "encrypted" or "=" in pattern):
                raise ConfigError(
                    f"--namespace {pattern}: expected at least {MIN_DIGITS} digits of an id as `lmcache-async inspect`"
                    " shows it, `encrypted`, or FIELD=VALUE such as model=NAME"
                )

    def takes(self, text: str) -> bool:
        """Whether records of this namespace are meant; `text` is "" for what cannot be read."""
        return not self.patterns or (bool(text) and any(_fits(pattern, text) for pattern in self.patterns))


EVERYTHING = Selection()


def _fits(pattern: str, text: str) -> bool:
    name, is_field, value = pattern.partition("=")
    if is_field:
        return str(fields_of(text).get(name)) == value
    if pattern == "encrypted":
        return is_encrypted_text(text)
    return namespace_id(text).startswith(pattern)
