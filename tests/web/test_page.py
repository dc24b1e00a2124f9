"""The status page of a real engine and a real daemon, in a real browser without a window."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.daemons import ThreadedDaemon, socket_path
from tests.web.browser import Browser
from tests.web.serving import served

TOKEN = "a-token-of-many-characters"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
TOKENS = list(range(40))


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).innerText"))


def cells(browser: Browser, table: str) -> list[list[str]]:
    return browser.evaluate(
        f"[...document.querySelectorAll('table[aria-label=\"{table}\"] tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )


def test_tiers_and_requests_are_in_tables(browser: Browser, tmp_path: Path) -> None:
    tiers = ["cpu", {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}]
    with served(tiers=tiers) as engine:
        engine.ask(
            "request-7", TOKENS, load_tokens=32, local_tokens=8, decided="partial", why="because of that"
        )
        browser.goto(engine.url)
        browser.until("document.querySelectorAll('tbody tr').length === 3")
        tier_rows, requests = cells(browser, "Tiers"), cells(browser, "Recent requests")

        assert [row[0] for row in tier_rows] == ["cpu", "disk"]
        assert "in place" in tier_rows[0][5]
        assert tier_rows[1][-1] == "closed"
        (request,) = requests
        assert request[1] == "request-7"
        assert request[2] == "vLLM itself 8 · cpu 40"
        assert request[3:5] == ["load a part", "because of that"]
        assert "/s" in request[5]
        assert "since the start: load a part 1" in text(browser, "#tables")
        assert text(browser, "h1") == "test"
        assert text(browser, "#state") == "live"
        assert browser.page.logged() == []


def test_charts_are_drawn_and_the_page_refreshes_itself(browser: Browser) -> None:
    with served() as engine:
        browser.goto(engine.url)
        browser.until("document.querySelectorAll('svg.plot').length >= 3")
        engine.ask("later", TOKENS)
        browser.until("document.body.innerText.includes('later')")
        browser.until("document.querySelectorAll('svg.plot polyline').length >= 3")
        browser.until("document.querySelectorAll('svg.plot polygon.stack').length >= 1")
        labels = browser.evaluate("[...document.querySelectorAll('svg.plot')].map(one => one.ariaLabel)")

        assert labels[0].startswith("Where prompt tokens came from: cpu ")
        assert browser.page.logged() == []


def test_a_load_under_way_is_no_computing(browser: Browser) -> None:
    with served() as engine:
        engine.plan("r", prompt_tokens=900, local_tokens=100, load_tokens=500, decided="load")
        browser.goto(engine.url)
        browser.until("document.querySelectorAll('tbody tr').length === 2")
        (row,) = cells(browser, "Recent requests")

    assert row[2] == "vLLM itself 100 · loading 500 · computed 300"


def test_names_of_others_are_text(browser: Browser) -> None:
    with served(model=HOSTILE) as engine:
        engine.ask(HOSTILE, TOKENS, decided="load", why=HOSTILE)
        browser.goto(engine.url)
        browser.until("document.querySelectorAll('tbody tr').length === 2")

        assert text(browser, "h1") == HOSTILE
        (request,) = cells(browser, "Recent requests")
        assert (request[1], request[4]) == (HOSTILE, HOSTILE)
        assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert browser.evaluate("document.title") == f"{HOSTILE} · engine"


def test_a_script_that_got_in_would_not_run(browser: Browser) -> None:
    """The policy refuses what is inline, should escaping ever fail."""
    with served() as engine:
        browser.goto(engine.url)
        browser.evaluate(
            "(() => { const made = document.createElement('div');"
            " made.innerHTML = `<img src=data:, onerror=\"document.title='taken'\">`;"
            " document.body.append(made); const script = document.createElement('script');"
            " script.textContent = \"document.title='taken'\"; document.body.append(script); })()"
        )
        browser.until("document.querySelectorAll('body > script').length === 1")

        assert browser.evaluate("document.title") != "taken"
        browser.until_logged("Content Security Policy")


def test_an_engine_that_ends_is_told_and_the_last_figures_stay(browser: Browser) -> None:
    with served() as engine:
        engine.ask("the-last", TOKENS)
        browser.goto(engine.url)
        browser.until("document.body.innerText.includes('the-last')")
        engine.close()
        notice = browser.until(
            "!document.getElementById('notice').hidden && document.getElementById('notice').innerText"
        )

        assert "There is no answer" in notice
        assert text(browser, "#state") == "no answer"
        assert "the-last" in text(browser, "#tables")


def test_without_scripts_the_page_says_where_the_figures_are(browser: Browser) -> None:
    with served() as engine:
        browser.run(browser.page.call("Emulation.setScriptExecutionDisabled", value=True))
        browser.run(browser.page.call("Page.navigate", url=engine.url))
        browser.until(f"location.href === {engine.url!r} && document.querySelector('main') !== null")

        shown = browser.until("document.querySelector('main').innerText")
        assert "status.json" in shown
        assert "lmcache-async top" in shown


def test_light_and_dark_are_the_readers_choice(browser: Browser) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with served() as engine:
        browser.goto(engine.url)
        seen = {}
        for scheme in ("light", "dark"):
            browser.run(browser.page.colours(scheme))
            seen[scheme] = browser.evaluate(paper)

    assert seen == {"light": "rgb(245, 246, 248)", "dark": "rgb(15, 18, 24)"}


def test_nothing_is_wider_than_a_telephone(browser: Browser) -> None:
    with served() as engine:
        engine.ask("r" * 150, TOKENS, why="w" * 300)
        browser.run(browser.page.resize(390, 800))
        browser.goto(engine.url)
        browser.until("document.querySelectorAll('tbody tr').length === 2")
        width = browser.evaluate("document.documentElement.scrollWidth")
        browser.run(browser.page.resize(1280, 900))

    assert width == 390


def test_the_page_works_with_a_token_and_says_when_it_is_gone(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with served(**{"http.token_file": str(file)}) as engine:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        browser.run(browser.page.call("Network.setExtraHTTPHeaders", headers=headers))
        browser.goto(engine.url)
        assert browser.until("document.getElementById('state').innerText === 'live'")
        browser.run(browser.page.call("Network.setExtraHTTPHeaders", headers={}))
        assert "401" in browser.until(
            "!document.getElementById('notice').hidden && document.getElementById('notice').innerText"
        )


@pytest.mark.parametrize("tenant", ["chat", "batch"])
def test_a_daemon_has_a_page_of_its_tenants(browser: Browser, tenant: str) -> None:
    quota = {tenant: {"max_bytes": "8MiB"}}
    with socket_path() as path, ThreadedDaemon(path, http={"listen": "127.0.0.1:0"}, tenants=quota) as daemon:
        key = uuid.uuid4().bytes

        def put() -> None:
            slot = daemon.pool.reserve(tenant, 4096)
            assert slot is not None
            daemon.pool.commit(tenant, key, slot)  # type: ignore[arg-type]

        daemon.call(put)
        url = daemon.daemon.status_url
        assert url is not None
        browser.goto(url)
        browser.until("document.querySelectorAll('tbody tr').length === 1")
        (row,) = cells(browser, "Tenants")

        assert row[0] == tenant
        assert "4 KiB of 8 MiB" in row[1]
        assert row[2] == "1"
        assert browser.page.logged() == []
