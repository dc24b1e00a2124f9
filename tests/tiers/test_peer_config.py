"""Options of the peer tier, and what it remembers of who has what."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import load_config
from lmcache_async.config.endpoint import Endpoint
from lmcache_async.config.explain import validate_options
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import ConfigError
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.plugins.peer import PeerConfig, PeerTier
from lmcache_async.plugins.peer.places import MAX_REJECTED, Places, rank
from lmcache_async.registry import Registry
from lmcache_async.testing.records import key_of
from lmcache_async.testing.rig import Rig

HERE = {"peers": ["a:1"]}


@pytest.mark.parametrize(
    ("given", "peers"),
    [
        (["a:1", "[::1]:2", "a:1"], [Endpoint("a", 1), Endpoint("::1", 2)]),
        ("a:1, b:2", [Endpoint("a", 1), Endpoint("b", 2)]),
        ('["a:1"]', [Endpoint("a", 1)]),
    ],
)
def test_peers_are_endpoints_each_once(given: object, peers: list[Endpoint]) -> None:
    assert list(PeerConfig.model_validate({"peers": given}).peers) == peers


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "peers is missing"),
        ({"peers": []}, "expected 1 to 64 peers"),
        ({"peers": ["a"]}, "expected name:port"),
        ({"peers": ["a:1/2"]}, "expected name:port"),
        ({"peers": ["me@a:1"]}, "expected name:port"),
        ({"peers": [f"h:{n}" for n in range(1, 66)]}, "expected 1 to 64 peers"),
        ({"peers": [7]}, "expected a list of host:port"),
        ({**HERE, "write_to": "rendevous"}, "did you mean rendezvous?"),
        ({**HERE, "password": "geheim"}, "there is no key password; did you mean password_file?"),
        ({**HERE, "password_variable": "geheim!"}, "expected the name of a variable"),
        ({**HERE, "password_variable": "A", "password_file": "/x"}, "are both set"),
        ({**HERE, "tls_ca_file": "/x"}, "files for TLS are given, but tls is false"),
        ({**HERE, "connections": 65}, "connections is 65"),
        ({**HERE, "retry_s": 0}, "a number of seconds above 0"),
    ],
)
def test_wrong_options_are_told_with_the_reason(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_options(PeerConfig, options, "tiers[1]")

    assert told in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"password_variable": "NOT_SET_HERE"}, "the variable NOT_SET_HERE is not set"),
        ({"username": "kv"}, "username is 'kv' without a password"),
        ({"tls": True, "tls_ca_file": "/none"}, "tls_ca_file: /none cannot be used"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PeerTier(PeerConfig.model_validate({**HERE, **options}))


@pytest.mark.parametrize(("write_to", "queue"), [("none", False), ("rendezvous", True)])
def test_only_a_tier_that_is_written_to_has_a_queue(write_to: str, queue: bool) -> None:
    rig = Rig()
    config = load_config(env={}, extra={"tiers": ["cpu", {"name": "peer", "write_to": write_to, **HERE}]})
    tiers = stacked_tiers(Registry(), config, rig.namespace, LimitedLogger(logging.getLogger("test")))

    assert (tiers[1].id, tiers[1].writer is not None) == ("peer", queue)


NAMES = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)


@given(names=NAMES, number=st.integers(0, 1 << 60), data=st.data())
def test_without_one_of_the_names_the_others_keep_their_order(
    names: list[str], number: int, data: st.DataObject
) -> None:
    order = [names[place] for place in rank(names, key_of(number))]
    assert sorted(order) == sorted(names)
    gone = data.draw(st.sampled_from(names))
    left = data.draw(st.permutations([name for name in names if name != gone]))

    assert [left[place] for place in rank(left, key_of(number))] == [name for name in order if name != gone]


def test_what_is_remembered_ends_in_time_and_in_number() -> None:
    places = Places(max_keys=2, keep_s=10.0)
    for number in range(3):
        places.note(key_of(number), [number, 7], now=100.0)

    assert [places.of(key_of(number), 109.9) for number in range(3)] == [set(), {1, 7}, {2, 7}]
    assert places.of(key_of(2), 110.0) == set()
    assert len(places) == 2


def test_who_has_a_key_no_more_is_forgotten_alone() -> None:
    places = Places(max_keys=9, keep_s=10.0)
    places.note(key_of(1), [1, 2], now=0.0)
    places.forget(key_of(1), 1)
    places.forget(key_of(2), 1)
    assert places.of(key_of(1), 1.0) == {2}
    places.forget(key_of(1), 2)
    assert len(places) == 0
    places.note(key_of(1), [3], now=0.0)
    places.note(key_of(1), [], now=0.0)
    assert len(places) == 0


def test_what_is_rejected_is_remembered_up_to_a_bound_and_until_it_is_put_again() -> None:
    places = Places(max_keys=9, keep_s=10.0)
    for number in range(MAX_REJECTED + 1):
        places.reject(key_of(number))
    assert [places.rejected(key_of(number)) for number in (0, 1, MAX_REJECTED)] == [False, True, True]
    places.accept(key_of(1))
    assert not places.rejected(key_of(1))
