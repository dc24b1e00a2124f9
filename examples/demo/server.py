"""One vLLM engine in its own process, controlled by JSON lines: requests on stdin, answers on stdout.

The output of vLLM goes to stderr, which the client saves as the log of the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


class Server:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(enable_prefix_caching=True, disable_log_stats=False, seed=0, **options)

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Return greedy tokens with the five best log-probabilities of each position, and the time to the first token."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
        start = time.perf_counter()
        output = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        seconds = time.perf_counter() - start
        completion = output.outputs[0]
        return {
            "ttft_s": output.metrics.first_token_latency,
            "seconds": seconds,
            "cached_tokens": output.num_cached_tokens or 0,
            "finish_reason": completion.finish_reason,
            "tokens": list(completion.token_ids),
            "logprobs": [
                {str(t): p.logprob for t, p in place.items()} for place in completion.logprobs or []
            ],
            "text": completion.text,
        }

    def reset(self, prompt: list[int]) -> dict[str, Any]:
        """Empty vLLM's own prefix cache. vLLM refuses while blocks are in use, so steps are run until it succeeds."""
        deadline = time.monotonic() + 30
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM's prefix cache was in use for 30 s")
            time.sleep(0.05)
            self.ask(prompt, 1)
        return {}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Serve requests until `exit` or the end of the input. The first request contains the options of the engine."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    server = Server(json.loads(requests.readline()))
    answer(ready=True)
    for line in requests:
        request = json.loads(line)
        operation = request.pop("do")
        if operation == "exit":
            break
        answer(**getattr(server, operation)(**request))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # from here on the output of vLLM and its children goes to the log
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
