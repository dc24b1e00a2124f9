"""One browser for all tests of the page: it takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """An empty page, as nobody left it."""
    yield started
    started.run(started.page.call("Network.setExtraHTTPHeaders", headers={}))
    started.run(started.page.call("Emulation.setScriptExecutionDisabled", value=False))
    started.goto("about:blank")
