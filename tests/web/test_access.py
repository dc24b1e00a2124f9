"""Access control of the status endpoint: tokens and host names, without a socket."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from lmcache_async.errors import ConfigError
from lmcache_async.metrics.http import AccessTokens, Responder, is_loopback_name
from tests.support.secret_files import secret_file
from tests.web.fake_source import FakeSource

TOKEN = "a-token-of-many-characters"
OTHER = "another-token-of-many-characters"


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {OTHER}", True),
        (basic(TOKEN), True),
        (basic(OTHER, user=""), True),
        ("", False),
        (TOKEN, False),
        ("Bearer", False),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        ("Basic !!!", False),
        (basic("", user=TOKEN), False),
        ("Bearer \udcff", False),
    ],
)
def test_a_token_is_accepted_as_bearer_and_as_basic_password(
    tmp_path: Path, said: str, allowed: bool
) -> None:
    tokens = AccessTokens.read(secret_file(tmp_path, f"# of the dashboard\n{TOKEN}\n\n{OTHER}\n"))

    assert tokens.allow(said) is allowed
    assert TOKEN not in repr(tokens)


def test_without_a_file_no_token_is_required() -> None:
    assert AccessTokens.read(None).allow("")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("short\n", 0o600, "line 1: a token must have at least 16"),
        ("two words are no token at all\n", 0o600, "and no space"),
        ("# nothing else\n", 0o600, "contains no token"),
        (TOKEN, 0o644, "all users may read it"),
    ],
)
def test_an_invalid_token_file_is_an_error(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        AccessTokens.read(secret_file(tmp_path, text, mode))

    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:7421", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("page.localhost:80", True),
        ("[::1]:7421", True),
        ("127.8.8.8", True),
        ("evil.example:7421", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("[::1", False),
        ("evil.example@127.0.0.1", True),  # its host is 127.0.0.1: no browser sends it
    ],
)
def test_only_loopback_names_are_accepted_as_host(host: str, ours: bool) -> None:
    assert is_loopback_name(host) is ours


def answers(source: FakeSource, **options: object) -> Responder:
    given = {"loopback": True, "interval_s": 1.0, **options}
    return Responder(source, [source.sample(), source.sample()], AccessTokens(), **given)  # type: ignore[arg-type]


def test_a_response_is_reused_for_many_readers() -> None:
    now = 100.0
    source = FakeSource()
    asked = answers(source, clock=lambda: now)
    for _ in range(50):
        assert asked.respond("GET", "/status.json", {"Host": "localhost"}).status == 200
    assert source.told == 1

    now += 1.0
    asked.respond("GET", "/status.json", {"Host": "localhost"})
    assert source.told == 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"])
def test_only_get_and_head_are_allowed(method: str) -> None:
    told = answers(FakeSource()).respond(method, "/status.json", {"Host": "localhost"})

    assert (told.status, told.headers["Allow"]) == (405, "GET, HEAD")
