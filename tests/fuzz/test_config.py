"""Any file, environment and mapping results in a config or a ConfigError, in bounded time and memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.config.lmcache import SUPPORTED
from lmcache_async.config.load import EXTRA
from lmcache_async.config.validation import known_keys
from lmcache_async.errors import ConfigError
from tests.fuzz.effort import effort, keep_at_it

KEYS = known_keys(EngineConfig)
VARIABLES = ["LMCACHE_ASYNC_" + key.upper().replace(".", "__") for key in KEYS]
VARIABLES += ["LMCACHE_" + key.upper() for key in SUPPORTED] + [
    "LMCACHE_ASYNC_CONFIG_FILE",
    "LMCACHE_CONFIG_FILE",
]

WORDS = "cpu disk none true 8GiB 1e400 -1 0x10 [cpu { 1_0 1:30:00 ~ 2026-13-01 !!set *a << nan .inf ${HOME} '"
words = st.sampled_from([*WORDS.split(), "9" * 5000, "!!binary x", "!!set {a}", "&a x", "? a", "- a", "\x85"])
texts = words | st.text(max_size=30).filter(lambda text: "\0" not in text)
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
names = (
    st.sampled_from(KEYS)
    | st.sampled_from(sorted(SUPPORTED))
    | st.sampled_from([key.split(".")[-1] for key in KEYS])
)
mappings = st.dictionaries(names | texts, values, max_size=5)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Text that resembles a config, or does not."""
    lines = draw(st.lists(st.tuples(names | texts, texts, st.integers(0, 3)), max_size=6))
    text = "\n".join(f"{' ' * (2 * depth)}{name.split('.')[-1]}: {value}" for name, value, depth in lines)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(texts) + text[at + draw(st.integers(0, 3)) :]
    return text


def load(**sources: object) -> EngineConfig | str:
    """Return the config or the error."""
    try:
        return load_config(**{"env": {}, **sources})  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)


ANY = {
    "file": documents() | st.text(max_size=200),
    "bytes": st.binary(max_size=200),
    "mapping": mappings,
    "environment": st.dictionaries(st.sampled_from(VARIABLES), texts | values.map(str), max_size=5),
}


@pytest.mark.parametrize("source", ANY)
def test_any_source_gives_a_config_or_a_config_error(tmp_path, source):
    file = tmp_path / "kv.yaml"

    def sources(given):
        if source == "mapping":
            return {"extra": given}
        if source == "environment":
            none = str(tmp_path / "none")
            return {
                "env": {
                    key: none if key.endswith("CONFIG_FILE") else value.replace("\0", "")
                    for key, value in given.items()
                }
            }
        file.write_bytes(given if source == "bytes" else given.encode("utf-8", "surrogatepass"))
        return {"path": file}

    @effort
    @given(ANY[source])
    def check(given):
        told = load(**sources(given))
        assert isinstance(told, EngineConfig) or (told and (source != "mapping" or EXTRA in told))

    keep_at_it(check)


def bomb(width: int, depth: int) -> str:
    """Return YAML whose aliases expand to width ** depth values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join([*lines, f"arena: *a{depth - 1}"])


@pytest.mark.parametrize(
    "text",
    [
        bomb(10, 12),
        bomb(2, 200),
        "arena: " + "[" * 25_000,
        "arena: " + "{a: " * 15_000,
        "a: " * 20_000,
        "- " * 30_000,
        "? " * 30_000,
        "arena: " + "9" * 60_000,
        "arena: '" + "x" * 60_000,
        "%TAG ! " + "y" * 60_000,
        "- &" + "a" * 60_000,
    ],
    ids=["wide", "deep", "lists", "maps", "keys", "items", "questions", "digits", "text", "tag", "anchor"],
)
@pytest.mark.parametrize("place", ["file", "variable"])
def test_yaml_bombs_are_refused_with_little_memory(tmp_path, text, place):
    file = tmp_path / "kv.yaml"
    file.write_text(text)
    sources = {"path": file} if place == "file" else {"env": {"LMCACHE_ASYNC_ARENA": "{" + text}}
    tracemalloc.start()
    try:
        told = load(**sources)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert isinstance(told, str)
    assert len(told) < 1000
    assert peak < 16 << 20  # for texts of a quarter of the size limit
