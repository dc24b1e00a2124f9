"""All mistakes of a file are reported at once, each with the same line as alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_async.cli.config import check_daemon_file, check_file
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import ChainError, ConfigError
from lmcache_async.integration.vllm.config import engine_config
from lmcache_async.registry import Registry
from lmcache_async.testing.rig import Rig
from tests.wrong_config.cases import DAEMON, ENGINE

REGISTRY = Registry()
SIZE = "expected a size in bytes, such as 8GiB, 500MB or 1048576"
HERE = [(text, lines) for text, lines in ENGINE if "\n" not in text and "{dir}" not in text]
OF_ONE_KEY = [(text, lines) for text, lines in HERE if not text.startswith("tiers")]
OF_ONE_TIER = [
    (text, lines)
    for text, lines in HERE
    if text.startswith("tiers: [{name") and "tiers[1]" not in "".join(lines)
]


def first_word(case: tuple[str, list[str]]) -> str:
    """The key of a case, or the name of its tier."""
    return case[0].removeprefix("tiers: [{name: ").replace(",", ":").replace("}", ":").partition(":")[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(OF_ONE_KEY), unique_by=first_word),
    st.lists(st.sampled_from(OF_ONE_TIER), unique_by=first_word, min_size=1),
)
def test_mistakes_in_one_file_are_all_reported(tmp_path, keys, tiers):
    rows = [
        "tiers:",
        *(f"- {text.removeprefix('tiers: [')[:-1]}" for text, _ in tiers),
        *(text for text, _ in keys),
    ]
    expected = [
        line.replace("line 1:", f"line {number}:", 1).replace("tiers[0]", f"tiers[{number - 2}]")
        for number, (_, lines) in enumerate([*tiers, *keys], 2)
        for line in lines
    ]
    file = tmp_path / "kv.yaml"
    file.write_text("\n".join(rows))

    found, _ = check_file(file, registry=REGISTRY)

    assert sorted(found) == sorted(line.replace("{file}", str(file)) for line in expected)


OF_OTHER_KEYS = [
    text
    for text, lines in DAEMON
    if text.startswith("max_bytes: 1GiB\n") and "\nhttp" not in text and "all tenants reserve" not in lines[0]
]


@pytest.mark.parametrize("text", OF_OTHER_KEYS)
def test_another_mistake_hides_none_of_a_daemon(tmp_path, text):
    text = text.replace("{dir}", str(tmp_path))
    file = tmp_path / "host.yaml"
    file.write_text(text)
    alone = check_daemon_file(file)[0]
    file.write_text(f"{text.replace('1GiB', 'much', 1)}\nmax_clientz: 1\nhttp: {{tls_key_file: /k}}\n")

    found = check_daemon_file(file)[0]

    assert set(alone) <= set(found)
    assert sorted(set(found) - set(alone)) == [
        f"{file}, line 1: max_bytes is 'much': {SIZE}",
        f"{file}, line 3: there is no key max_clientz; did you mean max_clients?",
        f"{file}, line 4: http.tls_key_file: tls_key_file requires tls_cert_file",
    ]


WRONG_EXTRA = {"chunk_size": 0, "tiers": [{"name": "cpu", "max_byte": 1}, "dsk"], "store.stages": ["hash"]}
TOLD = [
    "kv_connector_extra_config: chunk_size is 0: expected a whole number of at least 1",
    "kv_connector_extra_config: tiers[0] (cpu): there is no key max_byte; did you mean max_bytes?",
    (
        "kv_connector_extra_config: tiers[1] (dsk): there is no tier dsk; there are: cpu, disk, host, mooncake, redis,"
        " s3, valkey; did you mean disk?"
    ),
    (
        "kv_connector_extra_config: store.stages: the chain must end in BatchStored, but its last stage 'hash' gives"
        " HashedBatch"
    ),
]


def test_a_start_in_vllm_reports_mistakes_of_tiers_and_stages_too():
    class Transfer:
        kv_connector_extra_config = WRONG_EXTRA

    class Config:
        kv_transfer_config = Transfer

    with pytest.raises(ConfigError) as caught:
        engine_config(Config, 16)

    assert str(caught.value).split("\n") == TOLD


async def test_an_engine_refuses_a_config_with_every_mistake_of_its_plug_ins():
    rig = Rig()
    config = rig.config(tiers=WRONG_EXTRA["tiers"], **{"store.stages": ["hash"]})

    with pytest.raises(ConfigError) as caught:
        async with CacheEngine.open(config, layout=rig.layout, namespace=rig.namespace, registry=REGISTRY):
            pass

    assert str(caught.value).split("\n") == [
        TOLD[1],
        TOLD[2],
        TOLD[3].removeprefix("kv_connector_extra_config: "),
    ]


async def test_an_engine_refuses_one_mistake_with_its_own_kind_of_error():
    rig = Rig()

    with pytest.raises(ChainError, match="the chain must end in BatchStored"):
        async with rig.open(registry=REGISTRY, **{"store.stages": ["hash"]}):
            pass


def test_tiers_written_as_text_have_the_line_of_their_key_and_every_mistake(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text('chunk_size: 64\ntiers: \'[{"name": "cpu", "timeout_s": 0, "max_byte": 1}, dsk]\'\n')

    found, _ = check_file(file, registry=REGISTRY)

    assert found[0] == f"{file}, line 2: tiers[0].timeout_s is 0: expected a number of seconds above 0"
    assert found[1] == f"{file}, line 2: tiers[0] (cpu): there is no key max_byte; did you mean max_bytes?"
    assert found[2].startswith(f"{file}, line 2: tiers[1] (dsk): there is no tier dsk; ")
    assert len(found) == 3
