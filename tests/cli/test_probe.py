"""The probe of remote tiers: with a real server, and with tiers that misbehave."""

from __future__ import annotations

import pytest

from lmcache_async.cli.probe import probe_tier
from lmcache_async.config import TierSpec
from lmcache_async.engine.tiers import make_tier
from lmcache_async.errors import BudgetExceededError, TierUnavailableError
from lmcache_async.registry import Registry
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.diagnosis import Check, Outcome
from tests.support.tiers import altered, gives, hang, raises
from tests.support.valkey_servers import Server


def by_name(checks) -> dict[str, Check]:
    return {check.name.partition(" (")[0]: check for check in checks}


@pytest.fixture(scope="module")
def server():
    running = Server()
    running.start()
    yield running
    running.stop()


def spec_of(**options: object) -> TierSpec:
    return TierSpec.model_validate({"name": "valkey", **options})


def probed(spec: TierSpec) -> dict[str, Check]:
    return by_name(probe_tier(spec, make_tier(spec, Registry(), third_party=True)))


def test_a_record_is_stored_in_a_real_server_read_and_removed(server):
    checks = probed(spec_of(url=f"unix://{server.socket}"))

    assert checks["opens"].outcome is checks["record"].outcome is Outcome.OK
    assert "read back in" in checks["record"].found
    assert "a lookup takes" in checks["round trip"].found
    assert server.ask("DBSIZE") == 0


def test_an_unreachable_server_fails_with_advice():
    checks = probed(spec_of(url="valkey://127.0.0.1:1"))

    failed = [check for check in checks.values() if check.outcome is Outcome.FAIL]
    assert len(failed) == 1
    assert "127.0.0.1:1" in failed[0].found
    assert "check that its server runs" in failed[0].todo


async def put_late(self, key, buffer):
    await DictTier.put(self, key, buffer)
    await hang()


broken, keeping = {"get": raises(TierUnavailableError("gone"))}, {"remove": hang}
no_removal = {"capabilities": Capabilities()}


def spec_for(members) -> TierSpec:
    """Settings of a tier with timeouts for a busy machine, unless it hangs."""
    timeout_s = 0.2 if {hang, put_late} & {*members.values()} else 30
    return TierSpec(name="x", id="x", timeout_s=timeout_s, open_timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"put": gives(None)}, "the stored record was not returned"),
        ({"contains": gives(True)}, "a lookup failed: the tier reports a record that was never stored"),
        ({"__aenter__": hang}, "tier 'x': did not open within 0.2 s"),
        ({"__aenter__": raises(ValueError("no such pool"))}, "ValueError: no such pool"),
    ],
)
def test_a_tier_that_misbehaves_fails(members, told):
    checks = probe_tier(spec_for(members), altered(**members)())

    [failed] = [check for check in checks if check.outcome is Outcome.FAIL]
    assert failed.found.startswith(told)


@pytest.mark.parametrize(
    ("members", "outcome", "told", "left"),
    [
        (broken, Outcome.FAIL, "a get failed: gone", 0),
        ({"get_many": raises(BudgetExceededError("no memory"))}, Outcome.FAIL, "a get failed: no memory", 0),
        ({"get": raises(ValueError("a mistake"))}, Outcome.FAIL, "ValueError: a mistake", 0),
        ({"get": hang}, Outcome.FAIL, "a get failed: tier 'x': get_many did not answer in 0.2 s", 0),
        ({"put": put_late}, Outcome.FAIL, "a put failed: tier 'x': put_many did not answer in 0.2 s", 0),
        (
            keeping,
            Outcome.FAIL,
            "a removal failed: tier 'x': remove did not answer in 0.2 s; the record of 64 KiB may stay",
            1,
        ),
        (broken | keeping, Outcome.FAIL, "a get failed: gone; the record of 64 KiB may stay", 1),
        ({"remove": gives(False)}, Outcome.OK, "; the record of 64 KiB may stay", 1),
        (no_removal, Outcome.OK, "; the record of 64 KiB stays: the tier cannot remove it", 1),
        (
            broken | no_removal,
            Outcome.FAIL,
            "a get failed: gone; the record of 64 KiB may stay: the tier cannot remove it",
            1,
        ),
    ],
)
def test_the_probe_is_removed_or_reported(members, outcome, told, left):
    tier = altered(**members)()

    check = by_name(probe_tier(spec_for(members), tier))["record"]

    assert check.outcome is outcome
    assert check.found.endswith(told)
    assert len(tier.records) == left
