"""Takes the pictures of the docs: the status page, light and dark, and `top`, of a real engine with traffic.

The engine, its tiers and all that is moved are real; who asks is made up (`traffic.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import uvloop
from PIL import Image
from rich.console import Console

from lmcache_async.cli.top_client import StatusClient
from lmcache_async.cli.top_view import render
from tools.devtools import open_page
from tools.screenshots.traffic import Traffic, open_engine

WIDTH, MARGIN = 1280, 1
END = "document.querySelectorAll('[aria-label=\"Recent requests\"] tr')[6].getBoundingClientRect().bottom"
"""A page of all requests is long: six are enough."""
COLUMNS = 124


async def take(directory: Path, seconds: float) -> None:
    """Leave the pictures in the directory after so many seconds of traffic."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as disk:
        async with open_engine(Path(disk)) as (engine, rig):
            assert engine.status_url is not None  # the config asks for it
            traffic = asyncio.create_task(Traffic(engine, rig).run())
            try:
                async with open_page() as page:
                    await page.resize(WIDTH, 900, scale=1.5)
                    await page.goto(engine.status_url)
                    await asyncio.wait({traffic}, timeout=seconds)
                    for scheme in ("light", "dark"):
                        await page.colours(scheme)
                        await page.until("document.querySelectorAll('tbody tr').length > 4")
                        height = int(await page.evaluate(END)) + MARGIN
                        save(directory / f"status-{scheme}.png", await page.picture(WIDTH, height))
                    told = await asyncio.to_thread(StatusClient(engine.status_url).read)
                    drawn = terminal(told)
                    (Path(disk) / "top.svg").write_text(drawn, encoding="utf-8")
                    _, _, width, height = re.findall(r"[\d.]+", drawn.partition("viewBox=")[2])[:4]
                    await page.resize(int(float(width)), int(float(height)), scale=1.5)
                    await page.goto((Path(disk) / "top.svg").as_uri())
                    save(directory / "top.png", await page.picture())
            finally:
                traffic.cancel()
                await asyncio.wait({traffic})
            if not traffic.cancelled():
                await traffic  # it ends by a mistake alone


def terminal(told: dict[str, Any]) -> str:
    """A picture of `top` as SVG: rich's own, with a font that is there."""
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(render(told, width=COLUMNS))
    drawn = console.export_svg(title="lmcache-async top")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code", "DejaVu Sans Mono")


def save(file: Path, picture: bytes) -> None:
    """With 256 colours, which is all that there are, a tenth as long."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.screenshots", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("docs/images"), help="where they go")
    parser.add_argument("--seconds", type=float, default=115.0, help="of traffic before they are taken")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    with mock.patch("socket.gethostname", return_value="gpu-node-7"):  # nobody's own machine is in the docs
        uvloop.run(take(options.directory, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
