"""`lmcache-async warm`: copy prefixes of prompts to faster tiers, or load them into a running vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lmcache_async.cli import records as shared
from lmcache_async.cli.output import JSONFlag, counted, human, number
from lmcache_async.errors import ConfigError
from lmcache_async.maintenance.concurrency import Progress
from lmcache_async.maintenance.namespaces import Selection
from lmcache_async.maintenance.prompts import read_prompts, tokenizer_of
from lmcache_async.maintenance.stores import MAX_RECORD_BYTES, Stores
from lmcache_async.maintenance.warmup import Warmup, warm

if TYPE_CHECKING:
    from lmcache_async.maintenance.server import Requests


def warm_command(
    config: shared.Config = None,
    prompts: Annotated[
        Path | None,
        Option(help="File of prompts, as JSON lines: token ids or text.", dir_okay=False, exists=True),
    ] = None,
    trace: Annotated[
        Path | None,
        Option(
            help="Log of requests with their prompts; the most frequent ones are copied first.",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, Option(help="tokenizer.json, its directory, or a model's name; required for text.")
    ] = None,
    source: Annotated[
        str | None, Option("--from", help="The id of the tier to copy from; by default the slowest.")
    ] = None,
    to: Annotated[
        list[str] | None,
        Option(help="The id of a tier to copy to; by default all faster ones. May be repeated."),
    ] = None,
    rank: shared.Rank = None,
    namespace: shared.Namespaces = None,
    max_bytes: shared.MaxCopied = None,
    url: Annotated[
        str | None, Option(help="Instead request one token for each prompt from this vLLM server.")
    ] = None,
    model: Annotated[str | None, Option(help="Model of the server; by default its first one.")] = None,
    timeout: Annotated[
        float, Option(min=1, help="Maximum time of one request to the server, in seconds.")
    ] = 600,
    in_flight: shared.Concurrency = 4,
    max_record_bytes: shared.RecordSize = MAX_RECORD_BYTES,
    as_json: JSONFlag = False,
) -> None:
    """Copy the prefixes of prompts from a slower tier of a config to the faster ones.

    --url fills the memory of a running engine: the server loads the prompts and computes missing parts.
    Exits with 1 if a record was refused or a request failed.
    """
    file = prompts or trace
    if file is None or (prompts is not None and trace is not None):
        raise typer.BadParameter("give either --prompts or --trace")
    read = partial(read_prompts, file, by_use=trace is not None)
    if url is not None:
        if config is not None or source is not None or to:
            raise typer.BadParameter("--url excludes --config, --from and --to")
        from lmcache_async.maintenance.server import warm_server  # httpx is needed for this only

        async def ask(show: Progress) -> Requests:
            texts = [prompt for prompt, _ in read()]
            return await warm_server(url, texts, show, model=model, in_flight=in_flight, timeout_s=timeout)

        shared.run(ask, _sent_lines, as_json=as_json, passed=lambda sent: not sent.refused)
    stores = Stores(config, rank, in_flight, max_record_bytes)

    async def work(show: Progress) -> Warmup:
        selection = Selection(tuple(namespace or ()))
        slow, fast = _choose(stores.reachable(), source, to or [])
        cipher, hash_key = stores.keys()
        encode = None if tokenizer is None else tokenizer_of(tokenizer)
        async with contextlib.AsyncExitStack() as stack:
            opened, *targets = [
                await stack.enter_async_context(
                    stores.open(None, tier, change=tier != slow, create=tier != slow)
                )
                for tier in (slow, *fast)
            ]
            return await warm(
                opened,
                targets,
                read(),
                show,
                selection=selection,
                by_use=trace is not None,
                max_bytes=max_bytes,
                encode=encode,
                hash_key=hash_key,
                cipher=cipher,
            )

    shared.run(work, _lines, as_json=as_json, passed=lambda done: not done.refused)


def _choose(tiers: list[str], source: str | None, to: list[str]) -> tuple[str, list[str]]:
    """Return the source and the destinations. `tiers` are the reachable ones, fastest first."""
    for name in (*([source] if source is not None else []), *to):
        if name not in tiers:
            raise ConfigError(
                f"tier {name} cannot be reached outside of the engine; reachable tiers of the config: {tiers}"
            )
    slow = source or (tiers[-1] if tiers else "")
    fast = to or (tiers[: tiers.index(slow)] if slow in tiers else [])
    if not fast or slow in fast:
        raise ConfigError(
            f"there are no two tiers to copy between; reachable outside of the engine: {tiers or 'none'}. To warm the"
            " memory of a running vLLM, use --url"
        )
    return slow, fast


def _lines(done: Warmup) -> Iterator[str]:
    yield (
        f"{number(done.prompts, 'prompt')}, {number(done.tokens, 'token')};"
        f" {done.source} has prefixes of {number(done.found_tokens, 'token')}"
    )
    yield f"copied: {counted(done.copied)} ({human(done.bytes)}); there already: {counted(done.there)}"
    yield from shared.not_copied(done)


def _sent_lines(sent: Requests) -> Iterator[str]:
    cached = "not reported" if sent.cached_tokens is None else sent.cached_tokens
    prompts, tokens = number(sent.prompts, "prompt"), number(sent.tokens, "token")
    yield f"{sent.url} ({sent.model}): {prompts}, {tokens}; cached tokens: {cached}"
    if sent.refused:
        yield f"{number(sent.refused, 'request')} failed, the first with {sent.first_refusal}"
