"""`lmcache-async top`: a real engine in the terminal, and a sentence for whatever is in the way."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lmcache_async.cli import top
from lmcache_async.cli.output import plain
from lmcache_async.cli.top import watch
from lmcache_async.cli.top_client import StatusClient, StatusError
from lmcache_async.cli.top_view import render, spark, speed
from tests.daemon.daemons import ThreadedDaemon, socket_path
from tests.web.serving import served
from tests.web.top_calls import call

TOKEN = "a-token-of-many-characters"
TOKENS = list(range(40))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"# the first is said\n{TOKEN}\nanother-token-of-many-characters\n")
    file.chmod(0o600)
    return file


def test_once_shows_tiers_and_requests(tmp_path: Path) -> None:
    tiers = ["cpu", {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}]
    with served(tiers=tiers) as engine:
        engine.ask("request-7", TOKENS, local_tokens=8, load_tokens=32, decided="load", why="sooner")
        code, shown = call(engine.url, "--once")

    assert code == 0
    for word in ("disk", "in place", "closed", "request-7", "vLLM 8, cpu 40", "load", "held for requests"):
        assert word in shown, shown


def test_a_load_under_way_is_no_computing() -> None:
    with served() as engine:
        engine.plan("r", prompt_tokens=900, local_tokens=100, load_tokens=500, decided="load")
        _, shown = call(engine.url, "--once")

    assert "vLLM 100, loading 500, computed 300" in shown


def test_json_is_what_the_page_is_drawn_from() -> None:
    with served() as engine:
        engine.ask("request-7", TOKENS)
        code, shown = call(engine.url.removeprefix("http://"), "--once", "--json")

    assert code == 0
    assert json.loads(shown)["recent"][0]["request"] == "request-7"


def test_a_daemon_shows_its_tenants() -> None:
    tenants = {"chat": {"max_bytes": "8MiB"}}
    with (
        socket_path() as path,
        ThreadedDaemon(path, http={"listen": "127.0.0.1:0"}, tenants=tenants) as daemon,
    ):
        code, shown = call(str(daemon.daemon.status_url), "--once")

    assert code == 0
    assert "chat" in shown
    assert "0% of 8.0 MiB" in shown


def test_a_token_comes_from_the_variable_or_a_file(token_file: Path) -> None:
    with served(**{"http.token_file": str(token_file)}) as engine:
        without = call(engine.url, "--once")
        wrong = call(engine.url, "--once", LMCACHE_ASYNC_TOKEN="x" + TOKEN)
        by_variable, by_file = (
            call(engine.url, "--once", LMCACHE_ASYNC_TOKEN=TOKEN),
            call(engine.url, "--once", "--token-file", str(token_file)),
        )

    assert (without[0], wrong[0], by_variable[0], by_file[0]) == (2, 2, 0, 0)
    assert "wants a token" in without[1]
    assert "wants another token" in wrong[1]
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
def test_a_status_of_another_version_is_a_sentence(monkeypatch: pytest.MonkeyPatch, change: dict) -> None:
    with served() as engine:
        told = StatusClient(engine.url).read() | change
    if told["charts"] is None:
        del told["charts"]
    monkeypatch.setattr(StatusClient, "read", lambda self: told)
    code, shown = call("http://a", "--once")
    watched = call("http://a")

    assert code == 2
    assert "http://a speaks another version" in shown
    assert watched == (code, shown)
    assert call("http://a", "--once", "--json")[0] == 0


def test_it_ends_where_the_version_changes_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=160, height=60, file=io.StringIO(), force_terminal=True)
    with served() as engine:
        client = StatusClient(engine.url)
        told = client.read()
    monkeypatch.setattr(client, "read", lambda: told | {"tiers": [{"chunks": "some"}]})
    with pytest.raises(StatusError, match="speaks another version") as caught:
        watch(client, told, console, lambda: None)

    assert caught.value.refused


def test_names_of_others_rule_no_terminal() -> None:
    assert plain("a\x1b[31mb\x07\n[bold]") == "a�[31mb��[bold]"
    with served(model="\x1b]0;taken\x07") as engine:
        engine.ask("[link=http://evil]\x1b[2J", TOKENS, decided="load", why="")
        told = StatusClient(engine.url).read()
    console = Console(width=160, record=True, force_terminal=False)
    with console.capture() as shown:
        console.print(render(told))

    assert "\x1b" not in shown.get()
    assert "[link=http://evil]" in shown.get()


def test_nothing_that_a_server_tells_rules_the_terminal() -> None:
    """Whatever in a status is text, and whatever could have been."""
    evil = "\x1b]0;taken\x07:warning:[/b]\ud800"
    with served() as engine:
        engine.ask("request-7", TOKENS)
        told = StatusClient(engine.url).read()
    for chart in told["charts"]["list"]:
        chart["title"] = evil
        for series in chart["series"]:
            series["name"] = evil
    for tier in told["tiers"]:
        tier |= {"id": evil, "breaker": {evil: evil}}
    told["work"] |= {"running": evil, "late_calls": evil, "pinned_chunks": evil}
    told |= {"title": evil, "facts": [[evil, evil]]}
    console = Console(width=400, file=io.StringIO(), force_terminal=False)
    console.print(render(told))

    shown = console.file.getvalue()
    assert all(line.isprintable() for line in shown.splitlines())
    assert shown.count(plain(evil)) >= 8


def test_it_watches_until_it_is_told_to_end() -> None:
    """An engine that is gone for a while ends nothing."""
    console = Console(width=160, height=60, file=io.StringIO(), force_terminal=True)
    with served() as engine:
        client = StatusClient(engine.url)

        def ask() -> None:
            engine.ask("request-7", TOKENS)
            while not client.read()["recent"]:  # an answer is given again for a moment
                pass

        steps = iter([ask, engine.close, interrupt])
        with pytest.raises(KeyboardInterrupt):
            watch(client, client.read(), console, lambda: next(steps)())

    shown = console.file.getvalue()
    assert "request-7" in shown
    assert "what is shown is old" in shown.partition("request-7")[2]


def test_ctrl_c_is_an_end_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as engine:
        monkeypatch.setattr(top, "watch", lambda *_: interrupt())
        assert call(engine.url) == (0, "")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_lines_of_blocks_and_speeds() -> None:
    assert spark([0.0, None, 1.0, 0.5], 1.0).strip(" ") == "▁ █▅"
    assert spark([0.0], 0.0).strip(" ") == "▁"
    assert speed(0, 1) == speed(1, 0) == "-"
    assert [speed(n, 1.0) for n in (2e9, 25e9, 300e6, 1.5e6, 900.0)] == [
        "2.00 GB/s",
        "25.0 GB/s",
        "300 MB/s",
        "1.50 MB/s",
        "1 kB/s",
    ]
