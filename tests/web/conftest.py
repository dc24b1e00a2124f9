"""Headless Chromium for tests of the status page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tools.browser import FLAGS, require


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=require(), args=FLAGS, timeout=120_000)


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    with chromium.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(60_000)
        yield context.new_page()


@pytest.fixture
def console(page: Page) -> list[str]:
    """Messages and exceptions that the page has written to its console."""
    lines: list[str] = []
    page.on("console", lambda message: lines.append(message.text))
    page.on("pageerror", lambda error: lines.append(str(error)))
    return lines
