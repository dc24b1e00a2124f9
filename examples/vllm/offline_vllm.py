"""vLLM as a library: the common prefix of the second prompt is loaded instead of computed."""

from __future__ import annotations

import argparse
import random
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

WORDS = ("tide", "rope", "gull", "lamp", "fog", "net", "oar", "salt", "wind", "reef", "pier", "bell")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name or a folder")
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, without compilation")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        enforce_eager=options.enforce_eager,
        max_model_len=4096,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheAsyncConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"arena.max_bytes": "512MiB"},
        ),
    )
    choose = random.Random(1)
    document = " ".join(choose.choice(WORDS) for _ in range(1200))
    sampling = SamplingParams(temperature=0, max_tokens=8)
    for question in ("What is it about?", "Who wrote it?"):
        start = time.perf_counter()
        [output] = llm.generate([f"{document}\n\n{question}"], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        share = "cached tokens not reported"
        if output.num_cached_tokens is not None:
            share = f"{output.num_cached_tokens:5} of {len(output.prompt_token_ids):5} tokens from a cache"
        print(f"{question:18} {share}, {seconds:.3f} s", flush=True)
        # Empty vLLM's own cache in device memory, so that the next prompt can only hit in lmcache-async.
        while not llm.reset_prefix_cache():
            llm.generate(["."], SamplingParams(max_tokens=1), use_tqdm=False)  # a step, so that stores end


if __name__ == "__main__":
    main()
