"""Screenshots for the docs: the status page, light and dark, and `top`, of a real engine with synthetic traffic."""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import uvloop
from PIL import Image
from playwright.async_api import Page, async_playwright
from rich.console import Console

from lmcache_async.cli.top import StatusClient, render
from tools.browser import FLAGS, require
from tools.screenshots.traffic import Traffic, open_engine

WIDTH, MARGIN = 1280, 1
END = "document.querySelectorAll('[aria-label=\"Recent requests\"] tr')[6].getBoundingClientRect().bottom"
"""Bottom of the sixth request in the table; the screenshot ends there."""
COLUMNS = 124
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


async def take(directory: Path, seconds: float) -> None:
    """Write the screenshots to the directory after `seconds` of traffic."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as disk:
        async with open_engine(Path(disk)) as (engine, rig):
            assert engine.status_url is not None  # the config asks for it
            traffic = asyncio.create_task(Traffic(engine, rig).run())
            try:
                async with async_playwright() as playwright:
                    browser = await playwright.chromium.launch(executable_path=require(), args=FLAGS)
                    page = await browser.new_page(
                        viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5
                    )
                    await page.goto(engine.status_url)
                    await asyncio.wait({traffic}, timeout=seconds)
                    for scheme in SCHEMES:
                        await page.emulate_media(color_scheme=scheme)
                        await page.locator("tbody tr").nth(4).wait_for()
                        height = int(await page.evaluate(END)) + MARGIN
                        save(directory / f"status-{scheme}.png", await screenshot(page, WIDTH, height))
                    status = await asyncio.to_thread(StatusClient(engine.status_url).read)
                    drawing = terminal(status)
                    (Path(disk) / "top.svg").write_text(drawing, encoding="utf-8")
                    _, _, *size = re.findall(r"[\d.]+", drawing.partition("viewBox=")[2])[:4]
                    await page.goto((Path(disk) / "top.svg").as_uri())
                    save(directory / "top.png", await screenshot(page, *(int(float(one)) for one in size)))
            finally:
                traffic.cancel()
                await asyncio.wait({traffic})
            if not traffic.cancelled():
                await traffic  # it ended with an error


async def screenshot(page: Page, width: int, height: int) -> bytes:
    """Return the top of the page as PNG."""
    await page.set_viewport_size({"width": width, "height": height})
    return await page.screenshot()


def terminal(status: dict[str, Any]) -> str:
    """Return a drawing of `top` as SVG, with an installed font."""
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(render(status, width=COLUMNS))
    drawing = console.export_svg(title="lmcache-async top")
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    return drawing.replace("Fira Code", "DejaVu Sans Mono")


def save(file: Path, picture: bytes) -> None:
    """Save with a palette of 256 colours, which makes the file a tenth as large."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.screenshots", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("docs/images"), help="where to write them")
    parser.add_argument("--seconds", type=float, default=115.0, help="duration of the traffic before")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    with mock.patch("socket.gethostname", return_value="gpu-node-7"):  # not the name of this machine
        uvloop.run(take(options.directory, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
