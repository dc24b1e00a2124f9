"""`lmcache-async top`: the status of a real engine in the terminal, and error messages."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from lmcache_async.cli import top
from lmcache_async.cli.output import plain
from lmcache_async.cli.top import BLOCKS, StatusClient, render, spark, speed, watch
from lmcache_async.errors import ConfigError
from tests.support.daemons import ThreadedDaemon, socket_path
from tests.support.secret_files import secret_file
from tests.web.serving import served
from tests.web.top_calls import call

TOKEN = "a-token-of-many-characters"
TOKENS = list(range(40))


def test_once_shows_tiers_and_requests_in_the_width_of_the_terminal(tmp_path: Path) -> None:
    tiers = ["cpu", {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}]
    with served(tiers=tiers) as engine:
        engine.plan("r", prompt_tokens=900, local_tokens=100, load_tokens=500, decided="load")
        engine.ask("request-7", TOKENS, local_tokens=8, load_tokens=32, decided="load", why="sooner")
        code, shown = call(engine.url, "--once", COLUMNS="160")
        _, narrow = call(engine.url, "--once", COLUMNS="80")
        status = json.loads(call(engine.url.removeprefix("http://"), "--once", "--json")[1])

    assert code == 0
    assert [one["request"] for one in status["recent"]] == ["request-7", "r"]
    assert "vLLM 100, loading 500, computed 300" in shown
    for word in ("disk", "in place", "closed", "request-7", "vLLM 8, cpu 40", "load", "pinned"):
        assert word in shown, shown
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, shown.splitlines()))


def test_a_token_comes_from_the_variable_or_a_file(tmp_path: Path) -> None:
    token_file = secret_file(tmp_path, f"# the first is said\n{TOKEN}\nanother-token-of-many-characters\n")
    with served(**{"http.token_file": str(token_file)}) as engine:
        without = call(engine.url, "--once")
        wrong = call(engine.url, "--once", LMCACHE_ASYNC_TOKEN="x" + TOKEN)
        by_variable, by_file = (
            call(engine.url, "--once", LMCACHE_ASYNC_TOKEN=TOKEN),
            call(engine.url, "--once", "--token-file", str(token_file)),
        )

    assert (without[0], wrong[0], by_variable[0], by_file[0]) == (2, 2, 0, 0)
    assert "requires a token" in without[1]
    assert "requires another token" in wrong[1]
    assert TOKEN not in wrong[1]


@pytest.mark.parametrize(
    "change",
    [
        {"charts": None},
        {"tiers": None},
        {"tiers": [{"id": "cpu"}]},
        {"uptime_s": "long"},
        {"facts": [["one"]]},
        {"totals": {"prompt_tokens": "many"}},
        {"recent": [3]},
        {"kind": "daemon"},
    ],
)
def test_a_status_of_another_version_is_an_error_message(
    monkeypatch: pytest.MonkeyPatch, change: dict
) -> None:
    with served() as engine:
        told = StatusClient(engine.url).read() | change
    if told["charts"] is None:
        del told["charts"]
    monkeypatch.setattr(StatusClient, "read", lambda self: told)
    code, shown = call("http://a", "--once")
    watched = call("http://a")

    assert code == 2
    assert "http://a has the format of another version" in shown
    assert watched == (code, shown)
    assert call("http://a", "--once", "--json")[0] == 0


def test_no_field_of_a_status_can_control_the_terminal() -> None:
    """Applies to text fields, and to fields that are numbers in a valid status."""
    evil = "\x1b]0;taken\x07:warning:[/b]\ud800"
    assert plain(evil) == "�]0;taken�:warning:[/b]�"
    with served(model=evil[:-1]) as engine:
        engine.ask("[link=http://evil]\x1b[2J", TOKENS, decided="load", why="")
        told = StatusClient(engine.url).read()
    for chart in told["charts"]["list"]:
        chart["title"] = evil
        for series in chart["series"]:
            series["name"] = evil
    for tier in told["tiers"]:
        tier |= {"id": evil, "breaker": {evil: evil}}
    told["work"] |= {"running": evil, "late_calls": evil, "pinned_chunks": evil}
    told |= {"title": evil, "facts": [*told["facts"], [evil, evil]]}

    lines = drawn(told, 400)

    assert all(line.isprintable() for line in lines)
    assert "\n".join(lines).count(plain(evil)) >= 9
    assert "[link=http://evil]" in "\n".join(lines)


def test_watching_continues_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the engine does not answer."""
    console = Console(width=160, height=60, file=io.StringIO(), force_terminal=True)
    with served() as engine:
        client = StatusClient(engine.url)

        def ask() -> None:
            engine.ask("request-7", TOKENS)
            while not client.read()["recent"]:  # an answer is cached for a moment
                pass

        steps = iter([ask, engine.close, interrupt])
        status = client.read()
        with pytest.raises(KeyboardInterrupt):
            watch(client, status, console, lambda: next(steps)())
        monkeypatch.setattr(StatusClient, "read", lambda self: status | {"tiers": [{"chunks": "some"}]})
        with pytest.raises(ConfigError, match="has the format of another version"):
            watch(client, status, console, lambda: None)

    shown = console.file.getvalue()
    assert "request-7" in shown
    assert "the status shown is old" in shown.partition("request-7")[2]


def test_without_a_terminal_each_status_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = iter(["first", "second"])
    steps = iter([lambda: None, interrupt])
    monkeypatch.setattr(StatusClient, "read", lambda self: BUSY | {"title": next(titles)})
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=lambda _: next(steps)()))

    code, shown = call("127.0.0.1:1")

    assert code == 0, "Ctrl-C is a normal end"
    assert re.findall("first|second", shown) == ["first", "second"]


def test_sigterm_leaves_the_screen_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: float) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    console = Console(width=160, height=60, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(StatusClient, "read", lambda self: BUSY)
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=killed))
    monkeypatch.setattr(top, "Console", lambda **_: console)

    code, _ = call("127.0.0.1:1", TERM="xterm")

    assert code == 0
    assert console.file.getvalue().endswith("\x1b[?25h\x1b[?1049l"), (
        "the cursor and the normal screen are shown"
    )


CALLS = {"in_flight": 0, "errors": 0}
BUSY = {
    "kind": "engine",
    "title": "meta-llama/Llama-3.1-405B-Instruct-FP8-with-a-name-of-many-characters-and-then-some-more",
    "facts": [["rank", "3 of 8"], ["chunk", "256 tokens"], ["host", "gpu-node-17.example"], ["process", "123456"]],
    "time": 1000.0,
    "uptime_s": 987654.0,
    "totals": {
        "prompt_tokens": 987654321,
        "hit_tokens": 654321987,
        "loaded_bytes": 10**15,
        "load_seconds": 30000.0,
        "stored_bytes": 10**14,
        "store_copy_seconds": 30000.0,
    },
    "memory": {"bytes": 400 << 30, "leased_bytes": 399 << 30},
    "work": {"running": 128, "late_calls": 12, "pinned_chunks": 123456},
    "tiers": [
        {
            "id": name,
            "chunks": 98765432,
            "bytes": 987 << 30,
            "max_bytes": 2 << 40,
            "evictions": 87654321,
            "hit_chunks": 76543210,
            "stored_chunks": 65432109,
            "dropped": {"full": 5432109},
            "errors": {"timeout": 4321098},
            "corrupt": 321,
            "queue": {"bytes": 543 << 20},
            "breaker": {"lookup": "closed", "read": "open", "write": "half-open"},
            "calls": {
                "get_many": CALLS | {"bytes": 10**13, "seconds": 1000.0},
                "put_many": CALLS | {"bytes": 10**12, "seconds": 1000.0},
            },
            "in_place": False,
        }
        for name in ("a-disk-with-a-name-of-many-characters", "valkey")
    ],
    "charts": {
        "list": [
            {
                "title": "Where prompt tokens came from",
                "unit": "share",
                "series": [
                    {"name": "a-disk-with-a-name-of-many-characters", "values": [0.0] * 119 + [0.876]},
                    {"name": "valkey", "values": [0.0] * 119 + [0.123]},
                ],
            },
            {"title": "Bytes moved", "unit": "bytes/s", "series": [{"name": "loaded", "values": [1.0, 98.7e9]}]},
        ]
    },
    "recent": [
        {
            "request": f"chatcmpl-0123456789abcdef0123456789abcdef-{number}",
            "time": 1.0,
            "plan": {
                "prompt_tokens": 131072,
                "local_tokens": 16384,
                "hit_tokens": 65536,
                "load_tokens": 65536,
                "decided": "recompute",
                "why": "",
            },
            "loaded": {
                "tokens": 65536,
                "asked_tokens": 131072,
                "bytes": 10**10,
                "seconds": 12.3456,
                "by_tier": [["a-disk", 32768], ["valkey", 16384]],
            },
            "stored": {"tokens": 65536},
        }
        for number in range(20)
    ],
}  # fmt: skip


def drawn(told: dict, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(told, width=width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@settings(max_examples=40, deadline=None)
@given(st.integers(min_value=72, max_value=220))
@example(80)
def test_every_figure_is_shown_in_any_width(width: int) -> None:
    lines = drawn(BUSY, width)
    text = "\n".join(lines)

    assert max(cell_len(line) for line in lines) <= width
    [head] = [line for line in lines if line.startswith(" tier ")]
    assert len(re.findall(r"a-disk\S*…\S*characters|valkey", head)) == 2
    for name, figure in (("holds", "48% of 2.0 TiB"), ("chunks", "98,765,432"), ("hits", "76,543,210"),
                         ("stored", "65,432,109"), ("read", "10.0 GB/s"), ("write", "1.0 GB/s"),
                         ("queue", "543 MiB"), ("errors", "4,321,098 + 321 corrupt"), ("dropped", "5,432,109"),
                         ("evicted", "87,654,321"), ("breaker", "reads open, writes half-open")):  # fmt: skip
        [row] = [line for line in lines if line.startswith(f" {name} ")]
        assert row.count(figure) == 2, (name, figure)
    for name in ("age", "request", "prompt", "comes from", "decision", "load"):
        assert re.search(rf"(^| ){name}( |$)", text, re.MULTILINE), name
    for name, value in (("from the cache", "66.3% of 987,654,321 tokens"), ("loads", "33.3 GB/s"),
                        ("host memory", "399 GiB of 400 GiB"), ("pinned", "123456 chunks")):  # fmt: skip
        assert name in text
        assert value in text
    rows = [line for line in lines if re.search(r"chatcm\S*…", line)]
    assert len(rows) == 12
    assert all(re.search(rf"chatcm\S*…\S*-{number} ", row) for number, row in enumerate(rows)), (
        "their ends differ"
    )
    assert all("131,072" in row and "recompute" in row and "12345.6 ms" in row for row in rows)
    assert "…" not in re.sub(r"[\w-]+…[\w-]+", "", text), "only names lose a part"
    for figure in ("16,384", "32,768", "65,536"):  # of the sources of each request
        assert text.count(figure) >= 12
    [disk] = [line for line in lines if "87.6%" in line]
    [loaded] = [line for line in lines if "98.7 GB/s" in line]
    assert (disk[-1], loaded[-1]) == (BLOCKS[6], BLOCKS[7])


def test_a_daemon_fits_into_eighty_columns() -> None:
    tenants = {f"tenant-with-a-long-name-{number}": {"max_bytes": "8MiB"} for number in range(3)}
    with (
        socket_path() as path,
        ThreadedDaemon(path, http={"listen": "127.0.0.1:0"}, tenants=tenants) as daemon,
    ):
        lines = drawn(StatusClient(str(daemon.daemon.status_url)).read(), 80)
        code, shown = call(str(daemon.daemon.status_url), "--once")

    assert (code, "tenant-with-a-long-name-1" in shown) == (0, True)
    assert max(cell_len(line) for line in lines) <= 80
    assert sum("0% of 8.0 MiB" in line for line in lines) == 3


def interrupt() -> None:
    raise KeyboardInterrupt


def test_block_characters_and_rates() -> None:
    assert spark([0.0, None, 1.0, 0.5], 1.0).strip(" ") == "▁ █▅"
    assert spark([0.0], 0.0).strip(" ") == "▁"
    assert speed(0, 1) == speed(1, 0) == "-"
    assert [speed(n, 2.0) for n in (4e9, 3e6, 900.0)] == ["2.0 GB/s", "1.5 MB/s", "450 bytes/s"]
