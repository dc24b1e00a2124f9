"""Replies of RESP that are said in several places."""

from __future__ import annotations

import re


def error_reply(text: str) -> bytes:
    return b"-" + re.sub(r"[\r\n]", " ", text).encode() + b"\r\n"


def no_auth() -> bytes:
    return error_reply("NOAUTH say who you are: AUTH tenant token")


def not_writable() -> bytes:
    return error_reply("NOPERM this daemon takes nothing from peers; see peer.writable")


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)
