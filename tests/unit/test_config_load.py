"""Loading a config from a mapping, variables and a file, in order of precedence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lmcache_async.config import EngineConfig, TierSpec, load_config

YAML = """\
chunk_size: 128
arena: {max_bytes: 8GiB}
tiers:
  - cpu
  - {name: disk, path: file:///var/cache/kv, max_bytes: 100GiB, timeout_s: 10}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kv.yaml"
    path.write_text(YAML)
    return path


def leaves(model: type[BaseModel], above: tuple[str, ...] = ()):
    """Return every key with its field."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, (*above, name))
        yield (*above, name), info


def nested(pairs):
    content: dict = {}
    for (section, key), value in pairs.items():
        (content.setdefault(section, {}) if section else content)[key] = value
    return content


sizes = st.integers(2**25, 2**28).map(str) | st.sampled_from(["32MiB", "0.125 GiB", "40MB"])
settings = st.fixed_dictionaries(
    {},
    optional={
        ("", "chunk_size"): st.integers(1, 4096),
        ("", "hash_algorithm"): st.sampled_from(["xxh3_128", "blake3", "sha256"]),
        ("", "weights_fingerprint"): st.sampled_from(["sampled", "full", "text:mine"]),
        ("arena", "max_bytes"): sizes,
        ("arena", "huge_pages"): st.sampled_from(["yes", "off", "True", "0"]),
        ("store", "stages"): st.sampled_from(['["hash", "write"]', "hash,write"]),
        ("store", "batch_bytes"): sizes,
        ("retrieve", "timeout_s"): st.floats(0.1, 100),
        ("vllm", "reset_cache"): st.sampled_from(["all", "memory", "new_namespace"]),
        ("vllm", "socket_dir"): st.just("/run/kv"),
        ("", "tiers"): st.sampled_from(
            ['["cpu", {"name": "disk", "path": "/x", "max_bytes": "1GiB"}]', "cpu"]
        ),
    },
)


@given(settings)
def test_each_source_gives_the_same_config(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("config") / "kv.yaml"
    path.write_text(yaml.safe_dump(nested(pairs)))
    names = {key: "LMCACHE_ASYNC_" + "__".join(part for part in key if part).upper() for key in pairs}

    from_file = load_config(path, env={})
    from_variables = load_config(env={names[key]: str(value) for key, value in pairs.items()})
    from_nested = load_config(env={}, extra=nested(pairs))
    from_dotted = load_config(
        env={}, extra={".".join(filter(None, key)): value for key, value in pairs.items()}
    )

    dumps = [config.model_dump() for config in (from_file, from_variables, from_nested, from_dotted)]
    assert all(dump == dumps[0] for dump in dumps)


def test_a_config_survives_a_dump_and_a_load(file):
    config = load_config(file, env={})

    again = load_config(env={}, extra=json.loads(config.model_dump_json()))

    assert again.model_dump() == config.model_dump()


@given(st.sets(st.sampled_from(["extra", "own", "lmcache", "file"])))
def test_precedence_of_mapping_variable_lmcache_variable_file_default(tmp_path_factory, given_by):
    path = tmp_path_factory.mktemp("config") / "kv.yaml"
    path.write_text("chunk_size: 4\n" if "file" in given_by else "")
    env = {"LMCACHE_ASYNC_CHUNK_SIZE": "2"} if "own" in given_by else {}
    env |= {"LMCACHE_CHUNK_SIZE": "3"} if "lmcache" in given_by else {}

    config = load_config(path, env, {"chunk_size": 1} if "extra" in given_by else None)

    order = {"extra": 1, "own": 2, "lmcache": 3, "file": 4}
    assert config.chunk_size == min((order[name] for name in given_by), default=256)


def test_the_file_of_the_readme(file):
    config = load_config(file, env={})

    assert config.chunk_size == 128
    assert config.arena.max_bytes == 8 * 2**30
    assert [tier.id for tier in config.tiers] == ["cpu", "disk"]
    assert config.tiers[1].options == {"path": "file:///var/cache/kv", "max_bytes": "100GiB"}
    assert config.tiers[1].timeout_s == 10
    assert config.tiers[1].where == f"{file}, line 5: tiers[1] (disk)"


def test_sections_merge_and_lists_replace(file):
    env = {"LMCACHE_ASYNC_ARENA": '{"huge_pages": "no"}', "LMCACHE_ASYNC_ARENA__PREFAULT": "no"}
    tiers = ["cpu", {"name": "disk", "id": "a"}, {"name": "disk", "id": "b"}]
    config = load_config(file, env=env, extra={"tiers": tiers})

    assert (config.arena.max_bytes, config.arena.huge_pages, config.arena.prefault) == (
        8 * 2**30,
        False,
        False,
    )
    assert [tier.id for tier in config.tiers] == ["cpu", "a", "b"]


def test_the_defaults_are_a_valid_config():
    config = load_config(env={})

    assert config == EngineConfig()
    assert [tier.name for tier in config.tiers] == ["cpu"]
    assert config.arena.max_bytes == 4 * 2**30
    assert (config.retrieve.timeout_s, config.vllm.lookup_timeout_s) == (10, 0.5)


def test_pending_writes_are_half_of_the_arena_unless_configured():
    assert load_config(env={}, extra={"arena.max_bytes": "1GiB"}).max_pending_write_bytes == 2**29
    assert (
        load_config(env={}, extra={"store.max_pending_write_bytes": "1MiB"}).max_pending_write_bytes == 2**20
    )
    assert (
        load_config(env={}, extra={"store.max_pending_write_bytes": "none"}).max_pending_write_bytes == 2**31
    )


def test_the_environment_of_the_process_is_the_default(monkeypatch, file):
    monkeypatch.setenv("LMCACHE_ASYNC_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_ASYNC_COPY_THREADS", "7")

    assert load_config(env={}) == EngineConfig()
    assert (load_config().copy_threads, load_config().chunk_size) == (7, 128)


def test_the_file_is_named_by_argument_then_mapping_then_variable(file, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("chunk_size: 1\n")
    env = {"LMCACHE_ASYNC_CONFIG_FILE": str(other)}

    assert load_config(file, env, {"config_file": str(other)}).chunk_size == 128
    assert load_config(env=env, extra={"config_file": str(file)}).chunk_size == 128
    assert load_config(env=env).chunk_size == 1


@pytest.mark.parametrize(
    "named",
    [
        {"env": {"LMCACHE_ASYNC_CONFIG_FILE": "~/kv.yaml"}},
        {"env": {}, "extra": {"config_file": "~/kv.yaml"}},
    ],
)
def test_the_home_directory_is_expanded_in_the_name_of_the_file(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "kv.yaml").write_text("chunk_size: 128")

    assert load_config(**named).chunk_size == 128


@pytest.mark.parametrize("text", ["", "# nothing\n", "arena:\nstore: {}\n", "---\n"])
def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path, text):
    path = tmp_path / "kv.yaml"
    path.write_text(text)

    empty = {"LMCACHE_ASYNC_CHUNK_SIZE": " ", "LMCACHE_ASYNC_CONFIG_FILE": ""}
    assert load_config(path, env=empty) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT", "80"),
        ("SERVICE_PORT_HTTP", "80"),
        ("PORT", "tcp://10.0.0.1:80"),
        ("PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("PORT_80_TCP_ADDR", "10.0.0.1"),
        ("SERVER_PORT_80_TCP_PROTO", "tcp"),
    ],
)
@pytest.mark.parametrize("prefix", ["LMCACHE_", "LMCACHE_ASYNC_"])
def test_variables_of_kubernetes_for_a_service_are_ignored(prefix, name, value):
    assert load_config(env={prefix + name: value}) == EngineConfig()


def test_options_of_a_tier_are_beside_its_name_or_under_options():
    flat = TierSpec.model_validate({"name": "disk", "path": "/x"})
    spelled = TierSpec(name="disk", id="disk", options={"path": "/x"})

    assert flat == spelled
    assert spelled.where == "tier disk"


@pytest.mark.parametrize(("path", "info"), [*leaves(EngineConfig), *leaves(TierSpec)])
def test_every_field_is_documented(path, info):
    text = info.description or info.annotation.__doc__  # of a section: that of its class

    assert text, path
    assert text.endswith((".", ")"))


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().chunk_size = 1


def test_the_largest_values_are_accepted():
    largest = {"chunk_size": 1 << 24, "shutdown_timeout_s": 1e9, "vllm.prefill_tokens_per_s": "none"}
    found = load_config(env={}, extra=largest)

    assert (found.chunk_size, found.shutdown_timeout_s) == (1 << 24, 1e9)
    assert found.vllm.prefill_tokens_per_s is None
