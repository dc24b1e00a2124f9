"""Options of the valkey tier: accepted spellings, reasons of refusals, and redaction of secrets."""

import logging

import pytest

from lmcache_async.config import load_config
from lmcache_async.config.validation import validate_options
from lmcache_async.config.values import Endpoint
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.plugins.valkey import ValkeyConfig, ValkeyTier
from lmcache_async.plugins.valkey.config import parse_url, read_auth
from lmcache_async.plugins.valkey.connection import refusal
from lmcache_async.plugins.valkey.protocol import ErrorReply
from lmcache_async.plugins.valkey.topology import parse_redirect, parse_slots, slot_of
from lmcache_async.registry import Registry
from lmcache_async.testing.rig import Rig
from tests.support.secret_files import secret_file


@pytest.mark.parametrize(
    ("url", "endpoints", "username", "database"),
    [
        ("valkey://host", [Endpoint("host", 6379)], "", 0),
        ("redis://kv@host:7000/2", [Endpoint("host", 7000)], "kv", 2),
        (" rediss://host:1/?db=3", [Endpoint("host", 1)], "", 3),
        ("VALKEYS://[::1]:5", [Endpoint("::1", 5)], "", 0),
        ("unix:///run/a%20b.sock?db=4", [Endpoint(path="/run/a b.sock")], "", 4),
        (f"unix:///{'x' * 106}", [Endpoint(path=f"/{'x' * 106}")], "", 0),
        ("unix://kv@/run/s", [Endpoint(path="/run/s")], "kv", 0),
        ("valkey://a:1,b,a:1", [Endpoint("a", 1), Endpoint("b", 6379)], "", 0),
        ("redis-sentinel://a,b:2", [Endpoint("a", 26379), Endpoint("b", 2)], "", 0),
    ],
)
def test_urls_are_parsed(url, endpoints, username, database):
    address = parse_url(url)

    assert (list(address.endpoints), address.username, address.database) == (endpoints, username, database)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://host"}, "expected a URL such as valkey"),
        ({"url": "valkey://host:port"}, "expected name, name:port or [address]:port for each host"),
        ({"url": "valkey://host:99999"}, "expected name, name:port or [address]:port for each host"),
        ({"url": "valkey://host?timeout=3"}, "expected name, name:port or [address]:port for each host"),
        ({"url": "valkey://host/?tls"}, "expected nothing after the host but the number of a database"),
        ({"url": "valkey://host/?db=1&db=2"}, "expected nothing after the host but the number of a database"),
        ({"url": "valkey://host/1?db=2"}, "expected nothing after the host but the number of a database"),
        ({"url": "unix://"}, "expected the path of a socket"),
        ({"url": f"unix:///{'x' * 107}"}, "expected a path of at most 107 bytes, the limit of sockets"),
        ({"url": "redis://:geheim@host"}, "no password in the URL"),
        ({"url": "redis://:ge/he@im@host"}, "expected"),
        (
            {"url": "valkey://a", "tls": False, "tls_key_file": "/k"},
            "tls_key_file: it has no effect without TLS",
        ),
        (
            {"url": "valkey://a", "password": "geheim"},
            "there is no key password; did you mean password_file?",
        ),
        (
            {"url": "valkey://a", "password_variable": "geheim!"},
            "expected the name of an environment variable",
        ),
    ],
)
def test_wrong_options_are_reported_with_the_reason(options, message):
    with pytest.raises(ConfigError) as caught:
        validate_options(ValkeyConfig, options, "tiers[1]")

    assert message in str(caught.value)
    assert "geheim" not in str(caught.value)
    assert "ge/he@im" not in str(caught.value)


def test_missing_options_follow_from_the_url():
    sentinel = ValkeyConfig(url="redis-sentinel://a", tls=True)
    single = ValkeyConfig.model_validate({"url": "rediss://a", "tls": "none", "ttl_s": "86400"})

    assert (sentinel.effective_mode, sentinel.encrypted) == ("sentinel", True)
    assert (single.effective_mode, single.encrypted, single.ttl_s) == ("single", True, 86400)


def test_the_line_break_at_the_end_of_a_password_is_not_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_PASSWORD", "geheim\n")
    file = secret_file(tmp_path, "geheim\r\n")

    for options in ({"password_variable": "KV_PASSWORD"}, {"password_file": file}):
        assert read_auth(ValkeyConfig(url="valkey://a", **options)) == (b"AUTH", b"geheim")


def test_a_user_of_the_sentinels_without_a_password_stops_the_start():
    with pytest.raises(ConfigError, match="set sentinel_password_file"):
        ValkeyTier(ValkeyConfig(url="valkey://a", sentinel_username="kv"))


@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_valkey_and_redis_name_the_same_tier(name):
    rig = Rig()
    config = load_config(env={}, extra={"tiers": ["cpu", {"name": name, "url": "redis://host"}]})

    tiers = stacked_tiers(Registry(), config, rig.namespace, LimitedLogger(logging.getLogger("test")))

    assert [stacked.id for stacked in tiers] == ["cpu", name]


def test_slots_are_those_of_the_server():
    assert [slot_of(name) for name in (b"123456789", b"", b"foo")] == [0x31C3, 0, 12182]


def test_slots_and_redirects_are_read():
    asked = Endpoint("seed", 1)
    table = parse_slots([[0, 1, [b"a", 5, b"id"]], [2, 16383, [b"", 6, b"id"], [b"r", 7, b"id"]]], asked)

    assert table[:3] == [Endpoint("a", 5), Endpoint("a", 5), Endpoint("seed", 6)]
    assert parse_redirect("MOVED 42 h:7") == (42, Endpoint("h", 7))
    assert parse_redirect("ASK 42 [::1]:7") == (42, Endpoint("::1", 7))
    assert parse_redirect("MOVED 42 :7", asked) == (42, Endpoint("seed", 7))
    assert [parse_redirect(text) for text in ("MOVED", "MOVED 99999 h:7", "MOVED 1 h:x", "MOVED 1 :7")] == [
        None
    ] * 4


@pytest.mark.parametrize(
    "reply", [None, 3, [[0, 1]], [[0, 16384, [b"a", 5]]], [[5, 4, [b"a", 5]]], [[0, 1, [b"a", b"5"]]], [b"x"]]
)
def test_an_invalid_list_of_slots_is_refused(reply):
    with pytest.raises(ValueError, match="expected first slot, last slot"):
        parse_slots(reply, Endpoint("a", 1))


def test_a_refusal_names_place_problem_and_remedy():
    error = refusal("valkey at h:1", ErrorReply("OOM", "OOM command not allowed"))

    assert str(error).startswith("valkey at h:1 answered 'OOM command not allowed'; raise its maxmemory")
    assert len(str(refusal("x", ErrorReply("ERR", "ERR " + "y" * 1000)))) < 300
    assert "CLUSTER SLOTS and ASKING in a cluster" in str(refusal("x", ErrorReply("NOPERM", "NOPERM no")))
