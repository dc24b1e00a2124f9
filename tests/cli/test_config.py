"""`lmcache-async config`: values with their sources, and errors of files."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from lmcache_async.cli.config import check_file, config_values, flatten, format_value
from lmcache_async.config import EngineConfig, survey_config
from lmcache_async.daemon.config import load_daemon_config
from lmcache_async.registry import STAGES, Registry
from tests.cli.site import install
from tests.fuzz.test_config import names, values

FILE = """\
chunk_size: 128
arena.max_bytes: 1GiB
tiers:
  - cpu
  - name: disk
    path: /kv
    options: {max_bytes: 2GiB}
    layers: [{name: limit, max_calls: 3}]
  - {name: valkey, url: "valkey://me@host:1", password_variable: SOME_PASSWORD}
store:
  batch_bytes: 1MiB
"""
SECRET = "c0ffee" * 10 + "c0ff"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kv.yaml"
    path.write_text(FILE)
    return path


def shown_values(result) -> dict[str, tuple[str, str]]:
    assert result.exit_code == 0, result.output
    return {one["key"]: (one["value"], one["source"]) for one in json.loads(result.stdout)["values"]}


def test_each_value_has_its_source(invoke, file, monkeypatch):
    monkeypatch.setenv("LMCACHE_ASYNC_COPY_THREADS", "3")
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    extra = json.dumps({"store.timeout_s": 5})

    shown = shown_values(invoke("config", "show", file, "--extra", extra, "--json"))
    valid = invoke("config", "check", file)
    invalid = invoke("config", "show", file, "--extra", '{"chunk_size": 0}')

    assert (valid.exit_code, valid.stdout) == (0, f"{file}: valid\n")
    assert invalid.exit_code == 1
    assert invalid.stderr == (
        "kv_connector_extra_config: chunk_size is 0: expected a whole number of at least 1\n"
    )
    assert shown["chunk_size"] == ("128", f"{file}, line 1")
    assert shown["arena.max_bytes"] == ("1GiB", f"{file}, line 2")
    assert shown["arena.prefault"] == ("true", "default")
    assert shown["copy_threads"] == ("3", "LMCACHE_ASYNC_COPY_THREADS")
    assert shown["store.timeout_s"] == ("5.0", "kv_connector_extra_config")
    assert shown["store.batch_bytes"] == ("1MiB", f"{file}, line 11")
    assert shown["tiers[1].path"] == ("/kv", f"{file}, line 6")
    assert shown["tiers[1].max_bytes"] == ("2GiB", f"{file}, line 7")
    assert shown["tiers[1].io_threads"] == ("4", "default")
    assert shown["tiers[1].layers[0].max_calls"] == ("3", f"{file}, line 8")
    assert shown["tiers[2].layers[1].name"] == ("retry", "default")
    assert shown["tiers[2].password_variable"] == ("SOME_PASSWORD", f"{file}, line 9")


def test_every_key_of_the_config_is_shown(invoke):
    shown = shown_values(invoke("config", "show", "--json"))

    for name, info in EngineConfig.model_fields.items():
        section = getattr(info.annotation, "model_fields", None)
        for key in [name] if section is None else [f"{name}.{one}" for one in section]:
            assert key in shown or name == "tiers", key
    assert {source for _, source in shown.values()} == {"default"}


HIDING = """\
tiers:
  - cpu
  - {name: valkey, id: v1, auth: {user: me, password: hunter1}}
  - {name: valkey, id: v2, password: 11223344, pins: [[{api_key: 55667788}]]}
  - {name: unknown-tier, servers: [{host: a, password: hunter3}], session_token: [hunter4], secrets: {a: 99001122}}
  - {name: disk, path: /kv, max_bytes: 1GiB, layers: [{name: limit, credentials: {x: hunter5}, passwd: 1.5e9}]}
"""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_secret_of_invalid_options_is_shown(invoke, tmp_path, form):
    """Invalid options are shown as given, whatever their shape, without secrets."""
    file = tmp_path / "kv.yaml"
    file.write_text(HIDING)

    result = invoke("config", "show", file, *form)

    assert result.exit_code == 0, result.output
    for secret in ("hunter", "11223344", "55667788", "99001122", "1500000000"):
        assert secret not in result.output
    assert "{'user': 'me', 'password': '***'}" in result.output
    assert "[{'host': 'a', 'password': '***'}]" in result.output
    assert "[[{'api_key': '***'}]]" in result.output


def test_no_message_shows_a_secret_inside_an_invalid_value(invoke, tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: {password: hunter1}\narena: [{api_key: 11223344}]\n")

    for command in ("show", "check"):
        result = invoke("config", command, file)

        assert result.exit_code == 1
        assert "{'password': '***'}" in result.output
        assert "hunter1" not in result.output
        assert "11223344" not in result.output


LAYERS = st.lists(
    st.sampled_from(
        ["retry", {"name": "limit", "id": "few", "max_calls": 3}, {"name": "retry", "id": "more"}]
    ),
    unique_by=str,
    max_size=3,
)
TIERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["cpu", "disk"])},
        optional={
            "layers": st.none() | LAYERS,
            "timeout_s": st.floats(1e-6, 1e9),
            "id": st.sampled_from(["a", "b", "disk"]),
        },
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda tier: tier.get("id", tier["name"]),
)
CONTENT = st.fixed_dictionaries(
    {},
    optional={
        "tiers": TIERS,
        "arena.max_bytes": st.integers(1 << 30, 1 << 40),
        "store.max_pending_write_bytes": st.sampled_from([None, "none", "0.5GiB"]),
        "retrieve.stages": st.sampled_from(["plan, fetch", ["hash", "plan"]]),
        "http.listen": st.sampled_from([None, "[::1]:7420", "localhost:0"]),
        "hash_key_file": st.sampled_from(["/a b", "12", "/[x]: y", None]),
        "hash_algorithm": st.just("blake3"),
        "shutdown_timeout_s": st.floats(1e-6, 1e9),
        "vllm.kv_head_shards": st.sampled_from([None, 4]),
    },
).map(lambda content: content | ({"hash_algorithm": "sha256"} if "hash_key_file" in content else {}))


@settings(max_examples=60)
@given(content=CONTENT)
def test_the_shown_values_are_those_of_the_same_config(content):
    for tier in content.get("tiers", ()):
        if tier["name"] == "disk":
            tier |= {"path": "/kv", "max_bytes": "1GiB"}

    shown = values_of(survey_config(None, {}, content))
    again = values_of(survey_config(None, {}, nested(shown)))

    assert again == shown


def values_of(loaded) -> dict[str, str]:
    assert not loaded.problems
    return {one["key"]: one["value"] for one in config_values(loaded, Registry())}


def nested(shown: dict[str, str]) -> dict[str, object]:
    """Return the content of a file with the shown values."""
    content: dict[object, object] = {}
    for key, value in shown.items():
        inner = content
        *above, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", key)]
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {key: listed(value) for key, value in content.items()}


def listed(value):
    """Return a value in which mappings of indices are lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: listed(item) for key, item in value.items()}
    return [*inner.values()] if all(isinstance(key, int) for key in inner) else inner


def test_defaults_can_be_omitted(invoke, file):
    assert set(shown_values(invoke("config", "show", file, "--changed", "--json"))) == {
        "chunk_size",
        "arena.max_bytes",
        "store.batch_bytes",
        *(f"tiers[{index}].name" for index in range(3)),
        *(f"tiers[1].{key}" for key in ("path", "max_bytes", "layers[0].name", "layers[0].max_calls")),
        *(f"tiers[2].{key}" for key in ("url", "password_variable")),
    }


def test_a_file_of_lmcache_is_shown_with_our_keys(invoke, tmp_path):
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_cpu: true\nmax_local_cpu_size: 2\nenable_blending: true\n")

    result = invoke("config", "show", file)

    assert f"{file}, line 2" in next(line for line in result.stdout.splitlines() if "arena.max_bytes" in line)
    assert "no effect" in result.stderr
    assert "enable_blending" in result.stderr


def test_the_file_of_the_daemon_is_shown_and_checked(invoke, tmp_path):
    """A name chosen by the user is no secret."""
    file = tmp_path / "host.yaml"
    file.write_text("max_bytes: 2GiB\ntenants:\n  token-team:\n    reserved_bytes: 1GiB\n")

    shown = shown_values(invoke("config", "show", file, "--daemon", "--json"))

    assert shown["max_bytes"] == ("2GiB", f"{file}, line 1")
    assert shown["tenants.token-team.reserved_bytes"] == ("1GiB", f"{file}, line 4")
    assert shown["tenants.token-team.max_bytes"] == ("none", "default")
    assert invoke("config", "check", file, "--daemon").exit_code == 0


@pytest.mark.parametrize(
    ("text", "module", "extra"),
    [
        ("encryption.key_file: {key}", "cryptography.hazmat.primitives.ciphers", "encryption"),
        ("hash_algorithm: blake3", "blake3", "blake3"),
        ("tracing.enabled: true", "opentelemetry", "otel"),
    ],
)
def test_a_package_without_which_an_engine_does_not_start_is_reported(
    invoke, tmp_path, monkeypatch, text, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    key, path = tmp_path / "key", tmp_path / "kv.yaml"
    key.touch(mode=0o600)
    key.write_text(SECRET)
    path.write_text(f"chunk_size: 256\n{text.format(key=key)}\n")

    result = invoke("config", "check", path)

    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert result.stdout.startswith(f"{path}, line 2: {text.partition(':')[0].partition('.key')[0]}")
    assert result.stdout.endswith(f"pip install 'lmcache-async[{extra}]'\n")


def test_a_stage_that_cannot_be_imported_is_named(invoke, tmp_path, others):
    install(others, "broken", {"slow": "Slow"}, "raise RuntimeError('no licence')\n", group=STAGES)
    path = tmp_path / "kv.yaml"
    path.write_text("retrieve:\n  stages: [hash, plan, fetch, slow, verify, host_to_device]\n")

    result = invoke("config", "check", path)

    assert result.stdout == (
        f"{path}, line 2: retrieve.stages: the stage slow cannot be created: RuntimeError: no licence\n"
    )


def test_the_size_of_the_pool_has_no_default(invoke):
    shown = shown_values(invoke("config", "show", "--daemon", "--json"))

    assert shown["max_bytes"] == ("required", "default")
    assert "max_bytes" not in invoke("config", "show", "--daemon", "--changed").stdout


def test_an_option_of_the_daemon_without_effect_is_reported(invoke, tmp_path, caplog):
    file = tmp_path / "host.yaml"
    file.write_text("max_bytes: 2GiB\nsegment_bytes: 1MiB\n")
    note = f"no effect: {file}, line 2: segment_bytes: records of all sizes share the memory of the pool"

    for command in ("show", "check"):
        result = invoke("config", command, file, "--daemon")

        assert (result.exit_code, result.stderr) == (0, f"{note}\n")
    assert load_daemon_config(file, {}).max_bytes == 2 << 30
    assert caplog.messages == [note]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("{", "--extra: not JSON: "),
        ("[" * 100_000, "--extra: not JSON: "),
        ("3", '--extra: expected a mapping, such as {"arena.max_bytes": "8GiB"}'),
    ],
)
def test_an_extra_config_that_is_not_a_json_mapping_is_refused(invoke, file, extra, told):
    for command in ("show", "check"):
        result = invoke("config", command, file, "--extra", extra)

        assert result.exit_code == 2
        assert result.stderr.startswith(told)


@pytest.mark.parametrize("password", ["plain", "with/slash", "with@sign", "with?mark"])
def test_no_password_or_key_is_shown(invoke, monkeypatch, password):
    monkeypatch.setenv("LMCACHE_REMOTE_URL", f"redis://me:{password}@host:1")
    monkeypatch.setenv("LMCACHE_ASYNC_HASH_KEY", SECRET)
    monkeypatch.setenv("LMCACHE_ASYNC_HASH_ALGORITHM", "sha256")
    monkeypatch.setenv("LMCACHE_ASYNC_VLLM__SOCKET_DIR", "/tmp/a\u009b31mb")

    shown = invoke("config", "show").stdout

    assert shown_values(invoke("config", "show", "--json"))["hash_key"] == ("***", "LMCACHE_ASYNC_HASH_KEY")
    assert SECRET not in shown
    assert "/tmp/a�31mb" in shown, "values cannot control the terminal"

    assert "redis://***@host:1" in shown
    assert "with" not in shown.partition("redis://")[2].partition("host:1")[0]


class Inner(BaseModel):
    host: str
    password: str


class Share(BaseModel):
    share: int


class Nested(BaseModel):
    servers: tuple[Inner, ...]
    passwords: dict[str, int]
    tenants: dict[str, Share]
    use_token: bool


def test_only_secrets_of_valid_options_are_hidden():
    """The name of an option can make a number secret; a name chosen by the user cannot."""
    nested = Nested(
        servers=(Inner(host="a", password="hunter1"),),
        passwords={"a": 7654321},
        tenants={"token-team": Share(share=3)},
        use_token=True,
    )
    shown = {value["key"]: value["value"] for value in (format_value(*one, None) for one in flatten(nested))}
    assert "hunter1" not in shown["servers"]
    assert "'host': 'a'" in shown["servers"]
    assert shown["passwords"] == "***"
    assert shown["tenants.token-team.share"] == "3"
    assert shown["use_token"] == "true"


plugins = st.sampled_from(["cpu", "disk", "s3", "valkey", "host", "mooncake", "retry", "limit", "hash"])
options = st.dictionaries(st.sampled_from(["path", "url", "max_bytes", "layers", "id"]), values | plugins)
tier = st.builds(lambda name, given: {**given, "name": name}, plugins, options)
tiers = st.lists(tier | plugins, max_size=3)
documents = st.dictionaries(names | st.text(max_size=6), values, max_size=4) | st.fixed_dictionaries(
    {"tiers": tiers}
)
_REGISTRY = Registry()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(documents)
def test_every_problem_of_any_file_is_one_printable_line(tmp_path, document):
    file = tmp_path / "kv.yaml"
    file.write_text(json.dumps(document))  # JSON is YAML

    problems, notes = check_file(file, registry=_REGISTRY)

    assert all(line and line.isprintable() for line in (*problems, *notes))
