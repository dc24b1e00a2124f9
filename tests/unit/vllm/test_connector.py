"""The interface to vLLM: calls by vLLM's code, and no exception reaches it."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import multiprocessing
import re
import sys
import threading
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.logging_utils import NewLineFormatter
from vllm.v1.executor import Executor
from vllm.v1.outputs import KVConnectorOutput

from lmcache_async.config import load_config
from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm import connector as module
from lmcache_async.integration.vllm.config import awaited_tokens, layerwise_tokens, uses_tcp
from lmcache_async.integration.vllm.connector import LMCacheAsyncConnector
from lmcache_async.integration.vllm.events import hit_sources
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.jobs import StepMetadata
from lmcache_async.integration.vllm.plugin import NAME, register
from lmcache_async.integration.vllm.versions import CacheHitSource
from lmcache_async.logging import LimitedLogger
from lmcache_async.tiers.base import Medium
from tests.support.vllm_simulator import Setup, kv_cache_config, vllm_config


@pytest.fixture
def setup(tmp_path, socket_dir) -> Setup:
    return Setup(folder=tmp_path / "model", options={"vllm.socket_dir": str(socket_dir)})


def made(setup: Setup, role: KVConnectorRole = KVConnectorRole.SCHEDULER, **kv: Any) -> LMCacheAsyncConnector:
    return LMCacheAsyncConnector(vllm_config(setup), role, kv_cache_config(setup))


class Broken:
    """A side of the connector in which every call fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return fail

    @property
    def would_free_blocks(self) -> bool:
        raise RuntimeError("broken")

    def take_loads(self) -> tuple[()]:
        return ()


class Steps:
    """A worker connector that records calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.calls.append(name)

        return call


def test_stores_start_with_the_end_of_a_step_that_had_no_forward(setup: Setup):
    connector, steps = made(setup), Steps()
    connector.shutdown()
    connector.worker = steps  # type: ignore[assignment]

    connector.bind_connector_metadata(StepMetadata())
    connector.start_load_kv(None)
    connector.clear_connector_metadata()

    assert steps.calls == ["begin_step", "start_loads", "start_stores"]
    assert not connector.has_connector_metadata()


@pytest.fixture
def broken(setup: Setup) -> LMCacheAsyncConnector:
    connector = made(setup)
    connector.shutdown()
    connector.scheduler = Broken()  # type: ignore[assignment]
    return connector


def assert_does_nothing(connector: LMCacheAsyncConnector) -> None:
    """A connector whose scheduler side is off, or fails in every call."""
    request, blocks = SimpleNamespace(request_id="r"), SimpleNamespace(blocks=([],))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, blocks, 0)
    assert connector.build_connector_meta(SimpleNamespace()) == StepMetadata()
    connector.update_connector_output(KVConnectorOutput())
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert connector.request_finished(request, []) == (False, None)
    assert connector.has_pending_block_frees() is False
    is_off = connector.scheduler is None
    assert connector.reset_cache() is is_off  # a failed reset must not be reported as done
    connector.shutdown()


def test_no_failure_of_the_scheduler_connector_reaches_vllm(broken: LMCacheAsyncConnector):
    broken.update_state_after_alloc(SimpleNamespace(request_id="r"), SimpleNamespace(blocks=([],)), 16)
    unknown = {CacheHitSource.EXTERNAL_UNSPECIFIED: 16}
    assert broken.get_external_cache_hit_sources(SimpleNamespace(request_id="r"), 16) == unknown
    assert_does_nothing(broken)


def test_a_failure_is_logged_once_for_each_cause(broken: LMCacheAsyncConnector, monkeypatch, caplog):
    monkeypatch.setattr(module, "logger", LimitedLogger(logging.getLogger("test.border")))
    with caplog.at_level(logging.ERROR, logger="test.border"):
        for _ in range(5):
            broken.on_new_request(SimpleNamespace())
        broken.update_connector_output(KVConnectorOutput())

    assert [record.message for record in caplog.records] == [
        "an unexpected error of LMCacheAsyncConnector, please report it: RuntimeError: on_new_request is broken",
        "an unexpected error of LMCacheAsyncConnector, please report it: RuntimeError: update is broken",
    ]


def test_loads_reach_the_workers_even_if_stores_cannot_be_planned(broken: LMCacheAsyncConnector, monkeypatch):
    loads = (object(),)
    monkeypatch.setattr(broken.scheduler, "take_loads", lambda: loads, raising=False)

    assert broken.build_connector_meta(SimpleNamespace()).loads == loads


def test_an_offered_load_that_cannot_be_planned_is_reported_as_failed(
    broken: LMCacheAsyncConnector, monkeypatch
):
    lost: list[Any] = []
    monkeypatch.setattr(broken.scheduler, "fail_load", lambda *call: lost.append(call), raising=False)

    broken.update_state_after_alloc("request", "blocks", 0)
    assert lost == []
    broken.update_state_after_alloc("request", "blocks", 16)
    assert lost == [("request", "blocks")]


def test_an_error_in_a_step_of_the_worker_does_not_reach_vllm(broken: LMCacheAsyncConnector):
    broken.worker = Broken()  # type: ignore[assignment]

    broken.bind_connector_metadata(StepMetadata())
    broken.start_load_kv(None)
    broken.wait_for_layer_load("layer.0")
    broken.wait_for_save()


def test_a_missing_report_of_failed_blocks_is_an_error(broken: LMCacheAsyncConnector):
    broken.worker = Broken()  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="take_failed_blocks is broken"):
        broken.get_block_ids_with_load_errors()


@pytest.mark.parametrize(("wanted", "piecewise"), [("auto", False), ("never", False), ("always", True)])
def test_full_cuda_graphs_are_refused_if_each_layer_is_awaited(wanted: str, piecewise: bool):
    options = {"vllm.layerwise_load": wanted}
    assert LMCacheAsyncConnector.requires_piecewise_for_cudagraph(options) is piecewise


FULL = (KVGroup(0, 16),)


@pytest.mark.parametrize(
    ("wanted", "device", "changes", "groups", "awaited", "layerwise"),
    [
        ("auto", "cpu", {}, FULL, 100, 100),
        ("auto", "cuda", {}, FULL, 100, 0),
        ("always", "cuda", {}, FULL, 100, 100),
        ("never", "cpu", {}, FULL, 0, 0),
        # The end of a step must be known before the next one.
        ("always", "cuda", {"scheduler_config.async_scheduling": True}, FULL, 100, 0),
        ("auto", "cpu", {"scheduler_config.async_scheduling": True}, FULL, 100, 0),
        ("auto", "cpu", {"parallel_config.pipeline_parallel_size": 2}, FULL, 100, 0),
        # Engines of other ranks compute in lockstep.
        ("auto", "cpu", {"parallel_config.data_parallel_size": 2}, FULL, 0, 100),
        # VLLM must be able to repeat the step after a failed load.
        ("always", "cpu", {}, (KVGroup(0, 16), KVGroup(1, 16)), 100, 0),
        ("always", "cpu", {}, (KVGroup(0, 16, window=100),), 100, 0),
        ("always", "cpu", {"use_v2_model_runner": True}, FULL, 100, 0),  # it computes from a wrong position
        # Layers of draft models run after the end of the step is reported.
        *(
            ("auto", "cpu", {"speculative_config.method": name}, FULL, 100, 0)
            for name in ("eagle", "mtp", "draft_model")
        ),
        ("auto", "cpu", {"speculative_config.method": "ngram"}, FULL, 100, 100),
    ],
)
def test_loads_that_a_step_awaits(
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    device: str,
    changes: dict[str, Any],
    groups: tuple[KVGroup, ...],
    awaited: int,
    layerwise: int,
):
    config = vllm_config(setup)
    config.device_config.device_type = device
    config.speculative_config = (
        SimpleNamespace(method="none") if "speculative_config.method" in changes else None
    )
    monkeypatch.setattr(type(config), "use_v2_model_runner", False)  # it needs Triton
    for path, value in changes.items():
        *parts, name = path.split(".")
        monkeypatch.setattr(getattr(config, parts[0]) if parts else type(config), name, value)
    ours = load_config(env={}, extra={"vllm.layerwise_load": wanted, "vllm.layerwise_max_tokens": 100})

    assert awaited_tokens(ours, config) == awaited
    assert layerwise_tokens(ours, config, KVGroups(groups)) == layerwise


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_a_failed_load_is_recomputed_whatever_vllms_default_is(setup: Setup, multi: bool):
    setup = replace(setup, multi=multi, kv_role="kv_producer")
    config = vllm_config(setup)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"

    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config(setup))
    connector.shutdown()

    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert config.kv_transfer_config.is_kv_consumer  # for which vLLM defers frees
    assert connector.requires_kv_delivery is False  # a lost store is a later miss


@pytest.mark.parametrize(("transport", "lines"), [("tcp", 1), ("unix", 0)])
def test_workers_whose_addresses_do_not_arrive_are_reported_with_a_remedy(
    setup: Setup, transport: str, lines: int, monkeypatch, caplog
):
    """MultiConnector passes on the handshake of the first connector that has one."""
    monkeypatch.setattr(module, "logger", LimitedLogger(logging.getLogger("test.addresses")))
    options = {**(setup.options or {}), "vllm.lookup_transport": transport}
    setup = replace(setup, multi=True, options=options)
    scheduler = KVConnectorFactory.create_connector(
        vllm_config(setup), KVConnectorRole.SCHEDULER, kv_cache_config(setup)
    )
    with caplog.at_level(logging.WARNING, logger="test.addresses"):
        for _ in range(2):
            scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})
    scheduler.shutdown()

    found = [record.message for record in caplog.records if record.name == "test.addresses"]
    assert len(found) == lines
    assert all("vllm.lookup_transport to unix" in line for line in found)


@pytest.mark.parametrize("name", ["kv_load_failure_policy", "is_kv_consumer"])
def test_vllms_scheduler_reads_policy_and_role_after_it_has_made_the_connector(name: str):
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.__init__)

    assert 0 < source.index("create_connector(") < source.index(f"kv_transfer_config.{name}")
    assert "kv_transfer_config = self.vllm_config.kv_transfer_config" in source


def test_the_plugin_registers_the_name_in_vllm_and_may_run_twice():
    register()
    register()

    assert KVConnectorFactory.get_connector_class_by_name(NAME) is LMCacheAsyncConnector
    (entry,) = entry_points(group="vllm.general_plugins", name="lmcache_async")
    assert entry.load() is register


def test_vllms_contract_is_met():
    assert issubclass(LMCacheAsyncConnector, KVConnectorBase_V1)
    assert issubclass(LMCacheAsyncConnector, SupportsHMA)
    assert supports_hma(LMCacheAsyncConnector)
    assert not LMCacheAsyncConnector.__abstractmethods__
    assert list(inspect.signature(LMCacheAsyncConnector).parameters) == [
        "vllm_config",
        "role",
        "kv_cache_config",
    ]


@pytest.mark.parametrize("name", [name for name in vars(LMCacheAsyncConnector) if not name.startswith("_")])
def test_every_method_is_one_that_vllm_calls(name: str):
    theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)

    # Versions before 0.32 do not request the source of a hit.
    assert theirs is not None or name == "get_external_cache_hit_sources"
    if inspect.isfunction(theirs):
        ours = list(inspect.signature(getattr(LMCacheAsyncConnector, name)).parameters)
        assert ours == list(inspect.signature(theirs).parameters)


def test_a_wrong_key_stops_the_start_and_is_named(setup: Setup):
    config = vllm_config(setup)
    config.kv_transfer_config.kv_connector_extra_config["chunk_sise"] = 64

    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="chunk_sise"):
            LMCacheAsyncConnector(config, role, kv_cache_config(setup))


def test_unsupported_features_turn_the_connector_off_with_the_reason(setup: Setup, caplog, monkeypatch):
    monkeypatch.setattr(module, "logger", LimitedLogger(logging.getLogger("test.off")))
    cache = kv_cache_config(setup)
    cache.kv_cache_groups[0].enable_kv_transfer = False
    with caplog.at_level(logging.WARNING, logger="test.off"):
        scheduler = LMCacheAsyncConnector(vllm_config(setup), KVConnectorRole.SCHEDULER, cache)
        worker = LMCacheAsyncConnector(vllm_config(setup), KVConnectorRole.WORKER, cache)

    (line,) = [record.message for record in caplog.records if record.name == "test.off"]
    assert "does not allow" in line
    assert not scheduler.has_pending_push_work()
    assert_does_nothing(scheduler)
    worker.register_kv_caches({})
    worker.bind_connector_metadata(StepMetadata())
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()


def test_an_engine_that_cannot_be_opened_turns_the_worker_off(setup: Setup, caplog):
    worker = made(setup, KVConnectorRole.WORKER)
    with caplog.at_level(logging.ERROR):
        logging.getLogger("lmcache_async").propagate = True
        worker.register_kv_caches({})

    assert worker.worker is None
    worker.bind_connector_metadata(StepMetadata())
    worker.shutdown()


def test_log_lines_go_to_vllms_handlers_with_the_product_name(setup: Setup, monkeypatch):
    ours, theirs = logging.getLogger("lmcache_async"), logging.getLogger("vllm")
    text = io.StringIO()
    lines = logging.StreamHandler(text)
    lines.setFormatter(NewLineFormatter("%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s"))
    lines.setLevel(logging.WARNING)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    made(setup).shutdown()
    made(setup).shutdown()
    monkeypatch.setattr(theirs, "handlers", [lines])  # as with a different logging configuration of vLLM
    LimitedLogger(logging.getLogger("lmcache_async.plugins.disk")).report(
        "a", "tier %r: 100%% of %d", "disk", 3
    )
    logging.getLogger("lmcache_async").info("below the level of vLLM's handler")

    [line] = text.getvalue().splitlines()
    assert re.fullmatch(r"WARNING \[test_connector.py:\d+\] lmcache-async: tier 'disk': 100% of 3", line)


def test_importing_the_connector_starts_no_thread_and_no_device():
    process = multiprocessing.get_context("fork").Process(target=_import_the_connector)
    process.start()
    process.join(300)

    assert process.exitcode == 0
    process.close()


def _import_the_connector() -> None:
    """Import the connector as vLLM does: with vLLM imported, and nothing of this project.

    Runs in a fork, because a new interpreter takes many seconds to import vLLM.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmcache_async"]:
        del sys.modules[name]
    before = set(threading.enumerate())
    importlib.import_module(module.__name__)
    assert set(threading.enumerate()) == before
    assert not torch.cuda.is_initialized()
    assert "lmcache_async.integration.vllm.connector" in sys.modules
    assert "lmcache_async.integration.vllm.worker" not in sys.modules
    assert "lmcache_async.integration.vllm.scheduler" not in sys.modules


def test_hits_are_split_by_their_tiers_and_add_up():
    media = {"cpu": Medium.MEMORY, "nvme": Medium.DISK, "pool": Medium.MEMORY, "others": Medium.REMOTE}

    assert hit_sources({"cpu": 250, "pool": 250, "nvme": 250, "s3": 250}, 1001, media) == {
        CacheHitSource.HOST: 500,
        CacheHitSource.DISK: 250,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 251,
    }
    assert hit_sources({"others": 6, "unheard of": 2}, 8, media) == {
        CacheHitSource.EXTERNAL_UNSPECIFIED: 8,
    }
    assert hit_sources({}, 5, media) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 5}
    assert hit_sources({}, 0, media) == {}


DISK: dict[str, Any] = {"name": "disk", "max_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("tiers", "timeout", "own", "warns"),
    [
        (["cpu"], 0, 3.0, False),
        (["cpu", DISK], 0, 3.0, True),
        (["cpu", DISK], 2, 3.0, True),
        (["cpu", DISK], 30, 3.0, False),
        (["cpu", DISK], 30, 60.0, True),
        (["cpu", DISK], None, 3.0, False),  # a vLLM without that option
    ],
)
def test_a_stop_that_loses_queued_writes_causes_one_warning(
    tmp_path: Path, caplog, tiers: list[Any], timeout: int | None, own: float, warns: bool
):
    tiers = [tier if isinstance(tier, str) else tier | {"path": str(tmp_path / "kv")} for tier in tiers]
    setup = Setup(folder=tmp_path / "model", options={"tiers": tiers, "shutdown_timeout_s": own})
    config = vllm_config(setup)
    object.__setattr__(config, "shutdown_timeout", timeout)

    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        LMCacheAsyncConnector(config, role, kv_cache_config(setup)).shutdown()

    found = [
        record.getMessage() for record in caplog.records if "--shutdown-timeout 30" in record.getMessage()
    ]
    assert len(found) == warns
    assert all("queued for disk: " in line for line in found)


@pytest.mark.parametrize("executor", ["ray", "class"])
@pytest.mark.parametrize(("tiers", "warns"), [(["cpu"], False), (["cpu", DISK], True)])
def test_queued_writes_are_lost_with_ray_whatever_the_timeout(
    tmp_path: Path, caplog, executor: str, tiers: list[Any], warns: bool
):
    """Workers that are Ray actors are killed, without a call of `shutdown`."""
    tiers = [tier if isinstance(tier, str) else tier | {"path": str(tmp_path / "kv")} for tier in tiers]
    setup = Setup(folder=tmp_path / "model", options={"tiers": tiers})
    config = vllm_config(setup)
    object.__setattr__(config, "shutdown_timeout", 300)
    config.parallel_config.distributed_executor_backend = executors()[executor]

    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        LMCacheAsyncConnector(config, role, kv_cache_config(setup)).shutdown()

    found = [record.getMessage() for record in caplog.records if "loses writes queued" in record.getMessage()]
    assert len(found) == warns
    assert all("queued for disk: " in line and "Ray" in line for line in found)


@pytest.mark.parametrize(
    ("transport", "executor", "nodes", "tcp"),
    [
        ("auto", "mp", 1, False),
        ("auto", "mp", 2, True),
        ("auto", "ray", 1, True),
        ("auto", "class", 1, True),
        ("unix", "ray", 1, False),
        ("tcp", "mp", 1, True),
    ],
)
def test_lookups_use_tcp_if_workers_may_be_on_other_hosts(
    setup: Setup, transport: str, executor: str, nodes: int, tcp: bool
):
    config = vllm_config(setup)
    config.parallel_config.distributed_executor_backend = executors()[executor]
    config.parallel_config.nnodes = nodes

    assert uses_tcp(load_config(env={}, extra={"vllm.lookup_transport": transport}), config) is tcp


def executors() -> dict[str, Any]:
    """Executors by name. A class that uses Ray stands for vLLM's, which cannot be imported without Ray."""
    return {"mp": "mp", "ray": "ray", "class": type("RayExecutor", (Executor,), {"uses_ray": True})}
