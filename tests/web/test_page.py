"""The status page of a real engine and a real daemon, in headless Chromium."""

from __future__ import annotations

import uuid
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from lmcache_async.types import ChunkKey
from tests.support.daemons import ThreadedDaemon, socket_path
from tests.support.secret_files import secret_file
from tests.web.serving import served

TOKEN = "a-token-of-many-characters"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
TOKENS = list(range(40))


def text(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


def cells(page: Page, table: str) -> list[list[str]]:
    return page.evaluate(
        f"[...document.querySelectorAll('table[aria-label=\"{table}\"] tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )


def test_tiers_and_requests_are_in_tables(page: Page, console: list[str], tmp_path: Path) -> None:
    tiers = ["cpu", {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}]
    with served(tiers=tiers) as engine:
        engine.ask(
            "request-7", TOKENS, load_tokens=32, local_tokens=8, decided="partial", why="because of that"
        )
        engine.plan("loading", prompt_tokens=900, local_tokens=100, load_tokens=500, decided="load")
        page.goto(engine.url)
        expect(page.locator("tbody tr")).to_have_count(4, timeout=60_000)
        tier_rows, requests = cells(page, "Tiers"), cells(page, "Recent requests")

        assert [row[0] for row in tier_rows] == ["cpu", "disk"]
        assert "in place" in tier_rows[0][5]
        assert tier_rows[1][-1] == "closed"
        loading, request = requests
        assert loading[2] == "vLLM itself 100 · loading 500 · computed 300"
        assert request[1] == "request-7"
        assert request[2] == "vLLM itself 8 · cpu 40"
        assert request[3:5] == ["load a part", "because of that"]
        assert "/s" in request[5]
        assert "since the start: load 1, load a part 1" in text(page, "#tables")
        assert text(page, "h1") == "test"
        assert text(page, "#state") == "live"
        assert console == []


def test_charts_are_drawn_and_the_page_refreshes_itself(page: Page, console: list[str]) -> None:
    with served() as engine:
        page.goto(engine.url)
        page.locator("svg.plot").nth(2).wait_for(state="attached")
        engine.ask("later", TOKENS)
        page.get_by_text("later").first.wait_for()
        page.locator("svg.plot polyline").nth(2).wait_for(state="attached")
        page.locator("svg.plot polygon.stack").nth(0).wait_for(state="attached")
        labels = page.evaluate("[...document.querySelectorAll('svg.plot')].map(one => one.ariaLabel)")

        assert labels[0].startswith("Where prompt tokens came from: cpu ")
        assert console == []


def test_names_from_requests_are_shown_as_text(page: Page) -> None:
    with served(model=HOSTILE) as engine:
        engine.ask(HOSTILE, TOKENS, decided="load", why=HOSTILE)
        page.goto(engine.url)
        expect(page.locator("tbody tr")).to_have_count(2, timeout=60_000)

        assert text(page, "h1") == HOSTILE
        (request,) = cells(page, "Recent requests")
        assert (request[1], request[4]) == (HOSTILE, HOSTILE)
        assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert page.evaluate("document.title") == f"{HOSTILE} · engine"


def test_an_injected_script_does_not_run(page: Page) -> None:
    """The content security policy refuses inline scripts, should escaping ever fail."""
    with served() as engine:
        page.goto(engine.url)
        with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            page.evaluate(
                "(() => { const made = document.createElement('div');"
                " made.innerHTML = `<img src=data:, onerror=\"document.title='taken'\">`;"
                " document.body.append(made); const script = document.createElement('script');"
                " script.textContent = \"document.title='taken'\"; document.body.append(script); })()"
            )
        expect(page.locator("body > script")).to_have_count(1, timeout=60_000)

        assert page.evaluate("document.title") != "taken"


def test_when_the_engine_ends_a_notice_appears_and_the_last_figures_stay(page: Page) -> None:
    with served() as engine:
        engine.ask("the-last", TOKENS)
        page.goto(engine.url)
        page.get_by_text("the-last").first.wait_for()
        engine.close()

        expect(page.locator("#notice")).to_contain_text("No answer", timeout=60_000)
        assert text(page, "#state") == "no answer"
        assert "the-last" in text(page, "#tables")


def test_without_scripts_the_page_says_where_the_figures_are(chromium: Browser) -> None:
    with served() as engine, chromium.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(engine.url)

        shown = text(page, "main")
        assert "status.json" in shown
        assert "lmcache-async top" in shown


def test_the_page_follows_the_readers_colour_scheme(page: Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with served() as engine:
        page.goto(engine.url)
        seen = {}
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            seen[scheme] = page.evaluate(paper)

    assert seen == {"light": "rgb(245, 246, 248)", "dark": "rgb(15, 18, 24)"}


def test_the_page_fits_a_telephone(page: Page) -> None:
    with served() as engine:
        engine.ask("r" * 150, TOKENS, why="w" * 300)
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto(engine.url)
        expect(page.locator("tbody tr")).to_have_count(2, timeout=60_000)
        width = page.evaluate("document.documentElement.scrollWidth")

    assert width == 390


def test_the_page_works_with_a_token_and_reports_its_loss(page: Page, tmp_path: Path) -> None:
    with served(**{"http.token_file": str(secret_file(tmp_path, TOKEN))}) as engine:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        page.set_extra_http_headers(headers)
        page.goto(engine.url)
        expect(page.locator("#state")).to_have_text("live", timeout=60_000)
        page.set_extra_http_headers({})
        expect(page.locator("#notice")).to_contain_text("401", timeout=60_000)


def test_a_daemon_has_a_page_of_its_tenants(page: Page, console: list[str]) -> None:
    tenant = "chat"
    quota = {tenant: {"max_bytes": "8MiB"}}
    with socket_path() as path, ThreadedDaemon(path, http={"listen": "127.0.0.1:0"}, tenants=quota) as daemon:
        key = ChunkKey(uuid.uuid4().bytes)

        def put() -> None:
            slot = daemon.pool.reserve(tenant, key, 4096)
            assert slot is not None
            daemon.pool.commit(slot)

        daemon.call(put)
        url = daemon.daemon.status_url
        assert url is not None
        page.goto(url)
        expect(page.locator("tbody tr")).to_have_count(1, timeout=60_000)
        (row,) = cells(page, "Tenants")

        assert row[0] == tenant
        assert "4 KiB of 8 MiB" in row[1]
        assert row[2] == "1"
        assert console == []
