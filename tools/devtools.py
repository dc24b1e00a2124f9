"""A page in a headless Chromium, driven by the DevTools protocol: open, look, take a picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tools.browser import find

DEADLINE_S = 60.0
"""Of every wait; a browser on a busy machine takes seconds to start."""

OPTIONS = (
    "--headless",
    "--no-sandbox",  # as root there is none; the page is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Page:
    """One page. Made by `open_page`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            told: dict[str, Any] = await answer
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        value = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (value := await self.evaluate(script)):  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise TimeoutError(f"{script} is still {value!r}; the page shows:\n{shown}") from None
        return value

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    async def colours(self, scheme: str) -> None:
        """As if the reader liked `light` or `dark` pages."""
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def picture(self, width: int = 0, height: int = 0) -> bytes:
        """So much of the page, from its top, or all of it, as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        size = {"width": width or size["width"], "height": height or size["height"]}
        clip = {"x": 0, "y": 0, "scale": 1, **size}
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(told["data"])

    def logged(self) -> list[str]:
        """What the page wrote to its console, exceptions and refusals of the browser among it."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [str(event["params"]) for event in self.events if event.get("method") in names]

    async def read(self) -> None:
        """Take in what the browser says, until it closes."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self.events.append(told)


@contextlib.asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """An empty page in a browser of its own, which ends with the block.

    Raises:
        FileNotFoundError: There is no browser.
        TimeoutError: It did not start.
    """
    program = find()
    if program is None:
        raise FileNotFoundError("there is no Chromium: make install, or python -m tools.browser")
    with _browser(program) as (browser, directory):
        port = await _port(directory, browser)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            url = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
        await reading


@contextlib.contextmanager
def _browser(program: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Its process, and the directory of its profile; both are gone with the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as directory:
        browser = subprocess.Popen(
            [str(program), *OPTIONS, f"--user-data-dir={directory}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield browser, Path(directory)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
            browser.wait(DEADLINE_S)


async def _port(directory: Path, browser: subprocess.Popen[bytes]) -> int:
    file = directory / "DevToolsActivePort"
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if browser.poll() is not None:
                raise RuntimeError(f"{browser.args} ended with {browser.returncode}")
            if file.exists() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            await asyncio.sleep(0.02)
