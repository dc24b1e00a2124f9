"""The dashboard and the alerts of the examples, compared with the exported series."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.status import pool_samples
from lmcache_async.integration.vllm.metrics import _unregister
from lmcache_async.metrics.samples import exposition
from lmcache_async.metrics.series import SERIES
from lmcache_async.testing.records import key_of
from lmcache_async.testing.rig import Rig
from tests.support.vllm_simulator import SIMULATOR_OPTIONS, Setup, SimulatedVLLM, prompt

EXAMPLES = Path(__file__).parents[3] / "examples" / "observability"
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to all scraped series."""


@dataclass
class Series:
    """Samples by name, each with its labels."""

    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def read(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append({"job": "any", **sample.labels})

    def labels(self, name: str) -> set[str]:
        return {label for labels in self.samples[name] for label in labels} | SCRAPED


@dataclass(frozen=True)
class Query:
    where: str
    text: str

    @property
    def parsed(self) -> Any:
        fixed = re.sub(r"\$__(rate_interval|range)", "5m", self.text)
        fixed = re.sub(r'"\$\w+"', '".*"', fixed)  # a variable of the dashboard, set to All
        return promql_parser.parse(fixed)

    def __str__(self) -> str:
        return self.where


def dashboard() -> dict[str, Any]:
    return json.loads((EXAMPLES / "dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    return yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]


PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
QUERIES = [Query(f"{p['title']}: {t['refId']}", t["expr"]) for p in PANELS for t in p["targets"]]
QUERIES += [Query(rule["alert"], rule["expr"]) for rule in rules()]


@pytest.fixture(scope="module")
def series() -> Iterator[Series]:
    """Series of vLLM's /metrics, of an engine with a damaged disk, and of a daemon."""
    found = Series()
    directory = Path(tempfile.mkdtemp(prefix="lma"))
    try:
        found.read(vllm_metrics(directory))
        found.read(asyncio.run(damaged_engine(directory)))
        found.read(daemon())
        yield found
    finally:
        _unregister()
        shutil.rmtree(directory)


def vllm_metrics(directory: Path) -> str:
    options = {
        **SIMULATOR_OPTIONS,
        "vllm.socket_dir": str(directory),
        "tiers": ["cpu", {"name": "disk", "path": str(directory / "tier"), "max_bytes": "64MiB"}],
    }
    tokens = prompt(500)
    sim = SimulatedVLLM(Setup(folder=directory / "model", options=options))
    try:
        prom = KVConnectorProm(sim.config, ["model_name", "engine"], {0: ["tiny", "0"]})
        for number in range(4000):
            sim.add(f"request {number}", tokens, max_tokens=1)
            sim.run()
            sim.scheduler.reset_prefix_cache()
            for stats in sim.connector_stats:
                prom.observe(stats)
            sim.connector_stats = []
            text = generate_latest(REGISTRY).decode()
            if 'lmcache_async_retrieve_hit_tokens_total{engine="0",model_name="tiny",tier="cpu"} 0.0' in text:
                continue
            if "lmcache_async_load_tokens_total{" in text:
                return text
        raise AssertionError(text)
    finally:
        sim.close()


async def damaged_engine(directory: Path) -> str:
    rig = Rig()
    path = directory / "damaged"
    tokens, slots = list(range(100, 140)), list(range(40))
    async with rig.open(tiers=[{"name": "disk", "path": str(path), "max_bytes": "1MiB"}]) as engine:
        await engine.store(tokens, slots)
        record = next(one for one in path.rglob("*") if one.is_file() and one.stat().st_size > 4096)
        content = bytearray(record.read_bytes())
        content[4096] ^= 255
        record.write_bytes(content)
        await engine.retrieve(tokens, slots)
        return exposition(engine.metrics.read().families()).decode()


def daemon() -> str:
    pool = Pool(memoryview(bytearray(64 << 10)))
    slot = pool.reserve("team", key_of(1), 4096)
    assert slot is not None
    pool.commit(slot)
    return exposition(pool_samples(pool.statistics()).families()).decode()


def parts(expression: Any) -> list[Any]:
    """The expression and all of its subexpressions."""
    found = []
    promql_parser.walk(expression, lambda node: found.append(node) or True)
    return found


def matches(matcher: Any, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    match str(matcher.op).rsplit(".", maxsplit=1)[-1]:
        case "Equal":
            return bool(value == matcher.value)
        case "NotEqual":
            return bool(value != matcher.value)
        case "Re":
            return re.fullmatch(matcher.value, value) is not None
        case _:
            return re.fullmatch(matcher.value, value) is None


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_selects_existing_series_by_existing_labels(query: Query, series: Series) -> None:
    nodes = parts(query.parsed)
    selectors = [
        node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        for node in nodes
        if isinstance(node, promql_parser.VectorSelector | promql_parser.MatrixSelector)
    ]

    assert selectors
    known: set[str] = set()
    for selector in selectors:
        assert selector.name in series.samples, f"nothing gives {selector.name}"
        found = series.samples[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in series.labels(selector.name), f"{selector.name} has no {matcher.name}"
        assert any(all(matches(m, labels) for m in selector.matchers.matchers) for labels in found)
        known |= series.labels(selector.name)
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_names_only_labels_that_the_query_returns(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept: set[str] = set()
        for node in parts(Query("", target["expr"]).parsed):
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                kept |= set(node.modifier.labels)
        assert named <= kept
        assert len(panel["targets"]) == 1 or target["legendFormat"]


def test_panels_have_their_own_ids_and_places() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_variables_of_the_dashboard_query_existing_series(series: Series) -> None:
    asked = [one["definition"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    for query in asked:
        [(name, label)] = re.findall(r"label_values\((\w+), (\w+)\)", query)
        assert label in series.labels(name)
    used = set(re.findall(r"\$(\w+)", "".join(query.text for query in QUERIES)))
    assert used - {"__rate_interval", "__range"} == {"job", "tier"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_describes_the_problem_and_the_remedy(rule: dict[str, Any], series: Series) -> None:
    said = " ".join(rule["annotations"].values())
    kept = {
        label
        for node in parts(Query("", rule["expr"]).parsed)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }

    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(re.findall(r"\$labels\.(\w+)", said)) <= kept
    for name in re.findall(r"lmcache_async_\w+", said):
        assert name in series.samples or f"{name}_bucket" in series.samples


def test_prometheus_reads_the_rules_and_two_jobs() -> None:
    config = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())

    assert all((EXAMPLES / name).is_file() for name in config["rule_files"])
    assert [job["job_name"] for job in config["scrape_configs"]] == ["vllm", "lmcache-async-daemon"]


def test_the_documentation_lists_every_series_of_the_code() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(lmcache_async_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    assert documented == [
        (one.full_name, one.kind, ", ".join(f"`{label}`" for label in one.labels) or "none", one.help)
        for one in SERIES.values()
    ]
    names = {one.full_name for one in SERIES.values()}
    assert set(re.findall(r"lmcache_async_\w*\w", page)) - {"lmcache_async_"} <= names
