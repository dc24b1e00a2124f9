"""Fake vLLM process: it speaks the serve benchmark's JSON lines and reports invented times.

The variable FAKE_FAULT selects the fault, `<connector>:<what>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

BLOCK, CHUNK = 128, 256
TOKEN_S, HIT_S, OWN_HIT_S, DECODE_S = 1e-4, 2e-3, 1e-3, 5e-4


class Fake:
    def __init__(self, options: dict[str, Any]) -> None:
        transfer = options.get("kv_transfer_config") or {}
        self.name = transfer.get("kv_connector", "")
        faulty, _, what = os.environ.get("FAKE_FAULT", "").partition(":")
        self.fault = what if faulty == self.name else ""
        if self.fault == "dead":
            raise SystemExit("no such device")
        if self.fault == "needs stand_ins" and transfer.get("kv_connector_module_path") != "stand_ins":
            raise SystemExit("no connector for a CPU")
        tiers = transfer.get("kv_connector_extra_config", {}).get("tiers", ["cpu"])
        self.disk = Path(tiers[0]["path"]) if isinstance(tiers[0], dict) else None
        self.slow = self.disk is not None and "layers" in tiers[0]
        if directory := os.environ.get("LMCACHE_LOCAL_DISK"):
            self.disk = Path(directory.removeprefix("file://"))
        self.full = self.fault == "full at restart" and self.disk is not None and self.disk.exists()
        self.loads = 0
        self.own: set[str] = set()
        self.kept: set[str] = set()

    def serve(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.answer(request) for request in requests]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt, count = request["prompt"], request["max_tokens"]
        key = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
        cached, first_s = self.cached(key, len(prompt))
        if self.fault == "dies" and cached:
            raise MemoryError("out of memory")
        wrong = self.fault == "wrong" and cached > 0
        tokens = [int(key[2 * at : 2 * at + 2], 16) + wrong for at in range(min(count, 30))]
        tokens += [7] * (count - len(tokens))
        sent = 1e-3 * request["after"]
        return {
            "sent": sent,
            "times": [sent + first_s + at * DECODE_S for at in range(count)],
            "tokens": tokens,
            "logprobs": [{str(token): -0.5} for token in tokens],
            "cached_tokens": cached,
            "finish_reason": "length",
        }

    def cached(self, key: str, tokens: int) -> tuple[int, float]:
        """Tokens that are not computed, and seconds to the first token."""
        full, computed = (tokens - 1) // CHUNK * CHUNK, (0, tokens * TOKEN_S)
        if full == 0:
            return computed
        if key in self.own:
            return (tokens - 1) // BLOCK * BLOCK, OWN_HIT_S
        self.own.add(key)
        if not self.name:
            return computed
        if self.has(key) and self.fault != "misses":
            self.loads += 1
            return computed if self.slow and self.loads > 1 else (full, HIT_S)
        self.keep(key)
        return computed

    def has(self, key: str) -> bool:
        return (self.disk / key).exists() if self.disk else key in self.kept

    def keep(self, key: str) -> None:
        if self.full:
            return
        if self.disk:
            self.disk.mkdir(exist_ok=True)
            (self.disk / key).write_bytes(bytes(4096))
        self.kept.add(key)

    def reset(self, prompt: list[int]) -> None:
        self.own.clear()


def answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    fake = Fake(json.loads(sys.stdin.readline()))
    facts = {"vocabulary": 4096, "dtype": "float32"}
    answer(facts)
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("do")
        if operation == "exit":
            return
        answer(getattr(fake, operation)(**request))


if __name__ == "__main__":
    main()
