"""Layers around tiers, as composed by the config."""

from __future__ import annotations

import pytest

from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, load_config
from lmcache_async.engine.tiers import USUAL_ARENA_LAYERS, USUAL_LAYERS
from lmcache_async.errors import ConfigError
from lmcache_async.registry import LAYERS, Registry
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.middleware.base import Layer, LayerConfig

EXTRA = "kv_connector_extra_config"


class StampConfig(LayerConfig):
    text: str = ""


class StampLayer(Layer):
    """A third-party layer."""

    options_type = StampConfig
    bounded = True
    calls = 1

    async def around(self, call, next):
        for _ in range(self.calls - 1):
            await next(call)
        return await next(call)


REGISTRY = FakeRegistry(tiers={"dict": DictTier}, layers={"stamp": StampLayer, "none": DictTier})


async def built(*tiers) -> list[list[Layer]]:
    """Return the layers of each tier, outermost first."""
    async with Rig().open(registry=REGISTRY, tiers=list(tiers)) as engine:
        return [list(stacked.tier.layers) for stacked in engine._parts.stack.tiers]


def names(layers: list[Layer]) -> list[str]:
    return [layer.context.layer for layer in layers]


async def refusal(*tiers) -> str:
    with pytest.raises(ConfigError) as caught:
        async with Rig().open(registry=REGISTRY, tiers=list(tiers)):
            pass
    return str(caught.value)


async def test_without_a_list_a_tier_has_the_usual_layers():
    cpu, far = await built("cpu", "dict")

    assert names(cpu) == [spec.id for spec in USUAL_ARENA_LAYERS] == ["metrics"]
    assert names(far) == [spec.id for spec in USUAL_LAYERS]
    assert names(far) == ["metrics", "retry", "breaker", "deadline"]


async def test_an_empty_list_leaves_only_the_deadline():
    cpu, far = await built({"name": "cpu", "layers": []}, {"name": "dict", "layers": []})

    assert (names(cpu), names(far)) == ([], ["deadline"])


async def test_layers_are_around_the_tier_in_the_order_of_the_list_with_their_options():
    layers = [
        {"name": "retry", "attempts": 7, "base_s": 0.5},
        {"name": "limit", "options": {"max_bytes": "1MiB"}},
        {"name": "stamp", "id": "first", "text": "a"},
        {"name": "stamp", "id": "second", "text": "b"},
        "metrics",
    ]
    [found] = await built({"name": "dict", "timeout_s": 12, "layers": layers})

    assert names(found) == ["retry", "limit", "first", "second", "metrics", "deadline"]
    assert (found[0].options.attempts, found[0].options.base_s) == (7, 0.5)
    assert found[1].options.max_bytes == 1 << 20
    assert [layer.options.text for layer in found[2:4]] == ["a", "b"]
    assert {layer.context.timeout_s for layer in found} == {12}
    assert {layer.context.tier for layer in found} == {"dict"}


async def test_the_calls_that_the_outermost_metrics_layer_sees_are_exported():
    layers = ["metrics", "stamp", {"name": "metrics", "id": "inner"}]
    async with Rig().open(registry=REGISTRY, tiers=[{"name": "dict", "layers": layers}]) as engine:
        [stacked] = engine._parts.stack.tiers
        stacked.tier.layers[1].calls = 2
        await engine.lookup(list(range(8)))
        exported = engine.metrics.tier("dict").by_verb

    outer, inner = (stacked.tier.layers[index].statistics().verbs for index in (0, 2))
    assert {verb: call.calls for verb, call in inner.items()} == {"contains_many": 2}
    assert {verb: call.calls for verb, call in outer.items()} == {"contains_many": 1}
    assert exported == outer


async def test_tiers_of_one_engine_share_a_limit_and_another_engine_has_its_own():
    def tier(name):
        return {"name": "dict", "id": name, "layers": [{"name": "limit", "max_calls": 3, "share": "nic"}]}

    first, second = await built(tier("a"), tier("b"))
    [other] = await built(tier("a"))

    assert first[0]._budgets is second[0]._budgets
    assert other[0]._budgets is not first[0]._budgets


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ({"name": "stamp", "ids": "x"}, "(stamp): there is no key ids; did you mean id?"),
        ({"name": "none"}, "(none): 'none' is <class 'lmcache_async.testing.fakes.DictTier'>, which is no"),
        ({"name": "deadline", "timeout_s": 1}, "(deadline): there is no key timeout_s"),
        ({"name": "breaker", "slow": 1}, "(breaker): there is no key slow; did you mean slow_s?"),
    ],
)
async def test_a_wrong_layer_stops_the_start_and_says_where(layer, text):
    """The values of their options are in tests/wrong_config."""
    message = await refusal("cpu", {"name": "dict", "layers": [layer]})

    assert message.startswith(f"{EXTRA}: tiers[1] (dict), layers[0] {text}")


@pytest.mark.parametrize("name", ["retry", "breaker", "deadline", "faults", "stamp"])
async def test_a_layer_that_does_not_fit_the_arena_is_refused_around_a_tier_there(name):
    message = await refusal({"name": "cpu", "layers": ["metrics", name]})

    assert message == (
        f"{EXTRA}: tiers[0] (cpu), layers[1] ({name}): a tier in host memory answers at once and shares its"
        f" buffers with all readers; remove the layer {name!r} from its `layers`"
    )


def test_layers_come_from_a_file_too(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text(
        "tiers:\n- name: disk\n  layers:\n  - metrics\n  - {name: retry, attempts: 5}\n"
        "- {name: dict, layers: 'metrics, retry'}\n"
    )

    tier, other = load_config(file, env={}).tiers

    assert [layer.name for layer in other.layers] == ["metrics", "retry"]
    assert tier.layers == (
        LayerSpec(name="metrics", id="metrics"),
        LayerSpec(name="retry", id="retry", options={"attempts": 5}),
    )
    assert tier.options == {}


@pytest.mark.parametrize("value", [None, "none", ""])
def test_no_value_means_the_default(value):
    assert TierSpec.model_validate({"name": "disk", "layers": value}).layers is None


@pytest.mark.parametrize("name", sorted(Registry().available(LAYERS, third_party=False)))
def test_every_bundled_layer_can_be_configured(name):
    loaded = Registry().load(LAYERS, name)

    assert isinstance(loaded, type)
    assert issubclass(loaded, Layer)
    assert issubclass(loaded.options_type, LayerConfig)
    assert EngineConfig(tiers=[{"name": "disk", "layers": [name]}]).tiers[0].layers[0].name == name
