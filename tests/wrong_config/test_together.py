"""All mistakes of a file are reported at once, each with the same line as alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, example, given, settings
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

# In a message, @2 is the place of the fragment's third line, and #1 the index of its second tier.
SECTIONS: list[tuple[str, list[str]]] = [
    ("chunk_siz: 128", ["@0: there is no key chunk_siz; did you mean chunk_size?"]),
    ("arena:\n  max_byts: 1GiB", ["@1: there is no key arena.max_byts; did you mean arena.max_bytes?"]),
    (
        "store:\n  batch_bytes: 1GiB\n  stages: [hash, lookp]\n  timeout_s: -1",
        [
            "@1: store.batch_bytes: a batch of 1 GiB never fits into max_in_flight_bytes of 256 MiB",
            (
                "@2: store.stages: there is no stage lookp; there are: allocate, decrypt, device_to_host, encrypt, fetch,"
                " hash, host_to_device, lookup, plan, seal, verify, write; did you mean lookup?"
            ),
            "@3: store.timeout_s is -1: expected a number of seconds above 0",
        ],
    ),
    (
        "retrieve:\n  timeout_s: 1\n  timeout_s: soon",
        [
            "@2: retrieve.timeout_s is given twice, first on line @@1",
            "@2: retrieve.timeout_s is 'soon': expected a number of seconds above 0",
        ],
    ),
    (
        "hash_algorithm: xxh3\nhash_key_file: /none/key",
        [
            "@0: hash_algorithm is 'xxh3': expected 'xxh3_128', 'blake3' or 'sha256'; did you mean xxh3_128?",
            "@1: hash_key_file: /none/key cannot be read: No such file or directory",
        ],
    ),
    (
        "encryption: {keys: abc}",
        [
            (
                "@0: encryption.keys is a secret and not allowed there: name its file with encryption.key_file,"
                " or set LMCACHE_ASYNC_ENCRYPTION__KEYS"
            )
        ],
    ),
    (
        "http:\n  listen: 0.0.0.0:80\n  timeout_s: 0\n  tls_cert_file: /none/cert",
        [
            (
                "@1: http.listen: 0.0.0.0:80 is reachable from other machines without a token:"
                " set token_file, or listen at 127.0.0.1"
            ),
            "@2: http.timeout_s is 0: expected a number of seconds above 0",
        ],
    ),
    (
        "vllm:\n  layerwise_load: allways\n  reset_cash: all",
        [
            "@1: vllm.layerwise_load is 'allways': expected 'auto', 'always' or 'never'; did you mean always?",
            "@2: there is no key vllm.reset_cash; did you mean vllm.reset_cache?",
        ],
    ),
]
TIERS: list[tuple[str, list[str]]] = [
    ("- 3", ["@0: tiers[#0] is 3: expected a tier's name, or a mapping with `name` and the tier's options"]),
    ("- {path: /x}", ["@0: tiers[#0].name is missing"]),
    (
        "- {name: valky, id: b}",
        [
            ("@0: tiers[#0] (b): there is no tier valky; there are: cpu, disk, host, mooncake, redis, s3, valkey;"
            " did you mean valkey?")
        ],
    ),
    (
        ("- name: disk\n  id: a\n  pathh: /kv\n  path: /kv\n  options:\n    max_bytes: foo\n  layers:\n  - limt\n"
        "  - name: retry\n    base_s: 3\n    seed: -1"),
        [
            "@2: tiers[#0] (a): there is no key pathh; did you mean path?",
            f"@5: tiers[#0] (a): max_bytes is 'foo': {SIZE}",
            ("@7: tiers[#0] (a), layers[0] (limt): there is no layer limt; there are: breaker, deadline, faults, limit,"
            " metrics, retry; did you mean limit?"),
            "@9: tiers[#0] (a), layers[1] (retry): base_s: base_s is 3.0, above max_s of 1.0",
            "@10: tiers[#0] (a), layers[1] (retry): seed is -1: expected a whole number of at least 0",
        ],
    ),
    (
        "- name: cpu\n  id: c\n  timeout_s: 0\n  max_byte: 1\n  layers: [metrics, metrics, {name: metrics, id: m, x: 1}]",
        [
            "@2: tiers[#0].timeout_s is 0: expected a number of seconds above 0",
            "@3: tiers[#0] (c): there is no key max_byte; did you mean max_bytes?",
            ("@4: tiers[#0].layers[1].id: layers[0] and layers[1] both have the id 'metrics'; give one of them"
            " another `id`"),
            "@4: tiers[#0] (c), layers[2] (m): there is no key x",
        ],
    ),
    (
        "- {name: disk, id: twin, path: 3, max_bytes: 1GiB}\n- name: cpu\n  id: twin\n  max_bytes: x",
        [
            "@0: tiers[#0] (twin): path is 3: expected a path, plain or as file:///path",
            "@2: tiers[#1].id: tiers[#0] and tiers[#1] both have the id 'twin'; give one of them another `id`",
            f"@3: tiers[#1] (twin): max_bytes is 'x': {SIZE}",
        ],
    ),
    (
        "- name: s3\n  url: s3://b\n  part_bytes: 1KiB\n  access_key_id: a\n  account: c",
        [
            "@2: tiers[#0] (s3): part_bytes is '1KiB': expected at least 4096",
            ("@3: tiers[#0] (s3): access_key_id: access_key_id and secret_key (or secret_key_file) require each other;"
            " set both or neither"),
            "@4: tiers[#0] (s3): account: account is only valid for az:// URLs, and url is s3://b",
        ],
    ),
    (
        "- {name: valkey, id: v, url: 'valkey://h', password_variable: NOT_THERE, mode: all}",
        ["@0: tiers[#0] (v): mode is 'all': expected 'single', 'sentinel' or 'cluster'"],
    ),
    ("- {name: cpu, a: 1, options: {a: 1}, timeout_s: soon}", [
        "@0: tiers[#0].a: it is given twice, beside `options` and inside it",
        "@0: tiers[#0].timeout_s is 'soon': expected a number of seconds above 0",
        "@0: tiers[#0] (cpu): there is no key a",
    ]),
]  # fmt: skip


def composed(
    sections: list[tuple[str, list[str]]], tiers: list[tuple[str, list[str]]]
) -> tuple[str, list[str]]:
    """Return a file composed of the fragments, and its expected messages, with `{file}` for its name."""
    text, expected, index = "", [], 0
    if tiers:
        sections = [("tiers:", []), *sections]
    for fragment, messages in sections:
        expected += [placed(message, text.count("\n") + 1, index) for message in messages]
        text += fragment + "\n"
        if fragment == "tiers:":
            for item, told in tiers:
                expected += [placed(message, text.count("\n") + 1, index) for message in told]
                text += item + "\n"
                index += len(re.findall(r"^- ", item, re.MULTILINE))
    return text, expected


def placed(message: str, line: int, index: int) -> str:
    message = re.sub(r"@@(\d+)", lambda found: str(line + int(found[1])), message)
    message = re.sub(r"^@(\d+)", lambda found: f"{{file}}, line {line + int(found[1])}", message)
    return re.sub(r"#(\d+)", lambda found: str(index + int(found[1])), message)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=60,
    derandomize=True,
)
@given(
    st.lists(st.sampled_from(SECTIONS), unique_by=lambda one: one[0]),
    st.lists(st.sampled_from(TIERS), unique_by=lambda one: one[0]),
)
@example(SECTIONS, TIERS)
def test_mistakes_in_one_file_are_all_reported(tmp_path, sections, tiers):
    text, expected = composed(sections, tiers)
    file = tmp_path / "kv.yaml"
    file.write_text(text)

    found, _ = check_file(file, registry=REGISTRY)

    assert sorted(found) == sorted(message.replace("{file}", str(file)) for message in expected)


@pytest.mark.parametrize("text", [text for text, _ in ENGINE if text.startswith("tiers: [{")])
def test_another_mistake_hides_none_of_a_tier(tmp_path, text):
    text = text.replace("{dir}", str(tmp_path))
    file = tmp_path / "kv.yaml"
    file.write_text(text)
    alone, _ = check_file(file, registry=REGISTRY)
    file.write_text(f"{text}\nstore: {{timeout_s: -1}}\nchunk_siz: 1\n")

    found, _ = check_file(file, registry=REGISTRY)

    assert set(alone) <= set(found)
    assert len(found) == len(alone) + 2


OF_OTHER_KEYS = [
    text
    for text, lines in DAEMON
    if text.startswith("max_bytes: 1GiB\n") and "\nhttp" not in text and "of all tenants" not in lines[0]
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
