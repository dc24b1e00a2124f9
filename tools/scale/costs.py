"""Measured costs of operations. docs/scale.md names the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
BYTES_PER_TOKEN = {"8b": 128 << 10, "70b": 320 << 10, "mla": 70 << 10}
"""KV bytes per token of all ranks: Llama 8B and 70B in bfloat16, DeepSeek with MLA."""


@dataclass(frozen=True, slots=True)
class Message:
    """CPU seconds of the server per message, and per key in it."""

    call_s: float
    key_s: float

    def of(self, keys: float) -> float:
        return self.call_s + self.key_s * keys


# `python -m tools.scale.measure`
HOST_LOOKUP = Message(47e-6, 0.6e-6)
HOST_LEASE = Message(46e-6, 3.6e-6)  # with the release
HOST_STORE = Message(96e-6, 13.4e-6)  # reserve and commit
VALKEY_LOOKUP = Message(21e-6, 0.7e-6)
VALKEY_RECORD_S = 35e-6
VALKEY_GET_S_PER_BYTE = 236e-6 / MIB
VALKEY_PUT_S_PER_BYTE = 809e-6 / MIB
MASTER_LOOKUP = Message(33e-6, 0.25e-6)
MASTER_RECORD_S = 135e-6  # upper bound: includes the master's other work

# `python -m tools.scale.messages`: 64 chunks of 2 MiB are leased in 8 messages, with batches of 32 MiB
BATCH_BYTES = 16 * MIB

# docs/benchmarks/2026-11-22-host.md, two threads and two cores
COPY_BYTES_PER_S = 10.7e9
# docs/benchmarks/2026-11-22-mooncake.md, TCP, one call at a time, both ends on two cores
MOONCAKE_BYTES_PER_S = 1.76e9
