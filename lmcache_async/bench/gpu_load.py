"""Copies beside a compute load: what each costs the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case
from lmcache_async.bench.gpu_copies import IN, OUT

if TYPE_CHECKING:
    from lmcache_async.bench.frame import Parameter, Probe
    from lmcache_async.bench.gpu_copies import Copies, Copy
    from lmcache_async.bench.gpu_device import Products

WANTED_SLOWDOWN = 1.02


def load_cases(copies: Copies, products: Products, count: int, chunks: int, priority: int) -> list[Case]:
    """Two for each direction: the product with copies beside it, and the copies with products beside them.

    The copies wait for no fence: behind the products that were asked for, nothing of them would run beside.

    Args:
        count: Products asked for at one time.
        chunks: Of one batch; batches follow each other for as long as the products last.
    """
    cases = []
    nbytes = copies.nbytes(chunks)
    parameters: dict[str, Parameter] = {**copies.parameters(chunks), "products": count, "priority": priority}
    level = "high" if priority else "low"
    for way in (OUT, IN):
        paged = copies.paged(way, chunks, fenced=False)
        plain = copies.plain(way, copies.pieces(chunks))
        cases += [
            Case(
                f"product beside {way}, priority {level}",
                "ms",
                _product(products, count, paged),
                {
                    "product alone": _product(products, count, None),
                    "product beside memcpy": _product(products, count, plain),
                },
                {**parameters, "wanted": WANTED_SLOWDOWN},
            ),
            Case(
                f"{way} beside a product, priority {level}",
                "GB/s",
                _copies(products, count, paged, nbytes),
                {
                    f"{way} alone": _copies(products, 0, paged, nbytes),
                    "memcpy beside a product": _copies(products, count, plain, nbytes),
                },
                parameters,
            ),
        ]
    return cases


def _product(products: Products, count: int, copy: Copy | None) -> Probe:
    """Milliseconds of one product on the device."""

    async def probe() -> float:
        running = products.ask(count)
        while copy is not None and not running.ended():
            await copy()
        return running.milliseconds()

    return probe


def _copies(products: Products, count: int, copy: Copy, nbytes: int) -> Probe:
    """GB/s of the copies that end before the products do; of one, where none does, or there are no products."""

    async def probe() -> float:
        running = products.ask(count) if count else None
        start, ends = time.perf_counter(), list[float]()
        while not ends or (running is not None and not running.ended()):
            await copy()
            ends.append(time.perf_counter() - start)
        if running is not None:
            running.milliseconds()  # the next figure begins on an idle device
        beside = ends[:-1] or ends  # the products ended during the last one
        return nbytes * len(beside) / beside[-1] / 1e9

    return probe
