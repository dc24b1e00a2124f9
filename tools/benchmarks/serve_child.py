"""A vLLM in a process of its own, controlled by JSON lines: an operation on stdin, its result on stdout.

It is vLLM's asynchronous engine, as in a server. Times are those at which its stream yields tokens. The
output of vLLM goes to stderr, which the driver keeps as the engine's log.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections import deque
from typing import Any, TextIO

import uvloop

_RESET_S = 30.0
_LOGPROBS = 5


class Served:
    """The requests of one operation. Each is sent when earlier ones have generated enough tokens."""

    def __init__(self, engine: Any, requests: list[dict[str, Any]], number: int) -> None:
        self._engine = engine
        self._requests = requests
        self._name = f"serve-{number}"
        self._first = [at for at, request in enumerate(requests) if not request["after"]]
        later = [at for at in range(len(requests)) if requests[at]["after"]]
        self._later = deque(sorted(later, key=lambda at: int(requests[at]["after"])))
        self._answers: list[dict[str, Any]] = [{} for _ in requests]
        self._tokens = 0
        self._start = 0.0

    async def run(self) -> list[dict[str, Any]]:
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as self._group:
            async with asyncio.TaskGroup() as first:
                for at in self._first:
                    first.create_task(self._one(at))
            self._send_later(None)
        return self._answers

    def _send_later(self, tokens: int | None) -> None:
        """Send the requests that are due after this number of tokens; for None, all remaining ones."""
        while self._later and (tokens is None or self._requests[self._later[0]]["after"] <= tokens):
            self._group.create_task(self._one(self._later.popleft()))

    async def _one(self, at: int) -> None:
        request = self._requests[at]
        answer: dict[str, Any] = {"sent": self._now(), "times": [], "tokens": [], "logprobs": []}
        self._answers[at] = answer
        stream = self._engine.generate(
            {"prompt_token_ids": request["prompt"]}, _sampling(request["max_tokens"]), f"{self._name}-{at}"
        )
        async for output in stream:
            completion, now = output.outputs[0], self._now()
            answer["times"] += [now] * len(completion.token_ids)
            answer["tokens"] += completion.token_ids
            answer["logprobs"] += [
                {str(token): place.logprob for token, place in places.items()}
                for places in completion.logprobs or ()
            ]
            if not request["after"]:
                self._tokens += len(completion.token_ids)
                self._send_later(self._tokens)
            answer["cached_tokens"] = output.num_cached_tokens or 0
            answer["finish_reason"] = completion.finish_reason

    def _now(self) -> float:
        return time.perf_counter() - self._start


class Child:
    """Each public method is an operation that returns the answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        arguments = AsyncEngineArgs(
            enable_prefix_caching=True, skip_tokenizer_init=True, disable_log_stats=True, seed=0, **options
        )
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._number = 0

    @property
    def facts(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        return {
            "vocabulary": config.model_config.get_vocab_size(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        }

    async def serve(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return greedy tokens with log-probabilities, and their times in seconds since the first request."""
        self._number += 1
        return await Served(self._engine, requests, self._number).run()

    async def reset(self, prompt: list[int]) -> None:
        """Empty vLLM's own prefix cache. It refuses while blocks are in use, so steps are run in between."""
        async with asyncio.timeout(_RESET_S):
            while not await self._engine.reset_prefix_cache():
                await asyncio.sleep(0.05)
                await self.serve([{"prompt": prompt, "max_tokens": 1, "after": 0}])

    def close(self) -> None:
        self._engine.shutdown()


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=_LOGPROBS,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


async def serve(lines: TextIO, answers: TextIO) -> None:
    """Serve until `exit` or the end of the input. The first line has the engine's options."""

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    child = Child(json.loads(lines.readline()))
    try:
        answer(child.facts)
        gc.collect()
        gc.freeze()
        while line := await asyncio.to_thread(lines.readline):
            request = json.loads(line)
            operation = request.pop("do")
            if operation == "exit":
                break
            answer(await getattr(child, operation)(**request))
    finally:
        child.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # from here on, the output of vLLM and its children goes to the log
    uvloop.run(serve(sys.stdin, answers))


if __name__ == "__main__":
    main()
