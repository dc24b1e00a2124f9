"""Short ids, titles and selection of namespaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_async.errors import ConfigError
from lmcache_async.hashing.namespace import namespace_id

MIN_DIGITS = 4
_ENCRYPTED = "encrypted:"
_MAX_DEPTH = 8  # engines nest pairs in a list; text that is nested a thousandfold cannot be printed


def encrypted_text(key_id: str) -> str:
    """Return the text that stands for the namespace of records whose header is encrypted."""
    return _ENCRYPTED + key_id


def is_encrypted_text(text: str) -> bool:
    return text.startswith(_ENCRYPTED)


def fields_of(text: str) -> Mapping[str, Any]:
    """Return the fields of a namespace; an empty mapping if the text is not one that an engine writes."""
    try:
        text.encode("utf-8")
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) and _nests_at_most(fields, _MAX_DEPTH) else {}


def _nests_at_most(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_nests_at_most(each, depth - 1) for each in inner)


def title_of(text: str) -> str:
    """Return model and rank of a namespace."""
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
    """Namespaces that match a pattern. Without patterns it contains all records, unreadable ones too."""

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
        """Return whether a namespace is selected; `text` is "" for unreadable records."""
        return not self.patterns or (bool(text) and any(_matches(pattern, text) for pattern in self.patterns))


EVERYTHING = Selection()


def _matches(pattern: str, text: str) -> bool:
    name, is_field, value = pattern.partition("=")
    if is_field:
        fields = fields_of(text)
        return name in fields and str(fields[name]) == value
    if pattern == "encrypted":
        return is_encrypted_text(text)
    return namespace_id(text).startswith(pattern)
