"""Client of the examples: requests to `vllm serve` with the time to the first token, and long texts."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

SUBJECTS = (
    "The pump",
    "The valve",
    "The lamp",
    "The north gate",
    "The ledger",
    "The old boiler",
    "The crane",
)
DEEDS = ("is checked", "is closed", "is cleaned", "is counted", "is painted", "is left alone")
TIMES = ("every morning", "before a storm", "in spring", "once a year", "when the harbour is empty")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request.

    Attributes:
        ttft_s: Seconds until the first token.
        cached: Tokens of the prompt that were not computed; None if the server does not report them, as without
            --enable-prompt-tokens-details.
    """

    text: str
    ttft_s: float
    prompt: int
    cached: int | None

    def __str__(self) -> str:
        return f"{from_cache(self.cached, self.prompt)}, first token after {self.ttft_s:.3f} s"


def from_cache(cached: int | None, prompt: int) -> str:
    """Describe how much of a prompt was cached."""
    if cached is None:
        return f"{prompt:5} tokens, cached tokens not reported by the server"
    return f"{cached:5} of {prompt:5} tokens from a cache"


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="URL of the API")
    parser.add_argument("--model", help="name of the model; by default the first one of the server")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of the texts; a new seed gives texts that are not cached yet",
    )
    return parser.parse_args()


class Client:
    """Client of one server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._client = OpenAI(base_url=options.url, api_key="none", timeout=300)
        self._model = options.model or self._client.models.list().data[0].id

    def complete(self, prompt: str, max_tokens: int = 16) -> Answer:
        return self._timed(
            self._client.completions.create, lambda choice: choice.text, max_tokens=max_tokens, prompt=prompt
        )

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int = 16) -> Answer:
        return self._timed(
            self._client.chat.completions.create,
            lambda choice: choice.delta.content or "",
            max_tokens=max_tokens,
            messages=list(messages),
        )

    def _timed(self, create: Any, text_of: Any, **request: Any) -> Answer:
        start = time.perf_counter()
        first: float | None = None
        texts: list[str] = []
        usage: Any = None
        for event in create(
            model=self._model,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **request,
        ):
            if event.choices:
                first = first or time.perf_counter() - start
                texts.append(text_of(event.choices[0]))
            usage = event.usage or usage
        details = usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return Answer("".join(texts), first or 0.0, usage.prompt_tokens, cached)


def long_text(title: str, seed: int, sentences: int = 60) -> str:
    """Return a random text, the same for the same arguments."""
    choose = random.Random(f"{title} {seed}")
    lines = (
        f"{choose.choice(SUBJECTS)} {choose.choice(DEEDS)} {choose.choice(TIMES)}." for _ in range(sentences)
    )
    return f"{title}, edition {seed}.\n" + " ".join(lines)
