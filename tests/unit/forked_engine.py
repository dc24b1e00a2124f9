"""A process with an open engine that forks, for `test_fork.py`: prints the results of parent and child as JSON."""

import gc
import json
import os
import sys
import threading

import torch

from lmcache_async.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_async.config import load_config

TOKENS = list(range(40))
SLOTS = torch.arange(40)


class HeldLayers(dict):
    """Paged tensors that block the call that reads their addresses, which holds its locks."""

    def __init__(self, tensors):
        super().__init__(enumerate(tensors))
        self.read = threading.Event()
        self.go_on = threading.Event()

    def items(self):
        self.read.set()
        self.go_on.wait()
        return super().items()


def config_of(path):
    tiers = ["cpu", {"name": "disk", "path": path, "max_bytes": "16MiB"}] if path else ["cpu"]
    return load_config(
        env={},
        extra={
            "chunk_size": 8,
            "arena.max_bytes": 32 * 8192,
            "arena.prefault": False,
            "tiers": tiers,
        },
    )


def paged():
    return [torch.arange(2 * 32 * 4 * 4, dtype=torch.float32).reshape(2, 32, 4, 1, 4) for _ in range(2)]


def outcome(call):
    """The exception or the result of a call, as text."""
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001 - told
        return f"{type(error).__name__}: {error}"


def calls_of(engine, tensors):
    return {
        "store": lambda: engine.store(TOKENS, slot_mapping=SLOTS),
        "retrieve": lambda: engine.retrieve(TOKENS, slot_mapping=SLOTS),
        "lookup": lambda: engine.lookup(TOKENS),
        "pinned lookup": lambda: engine.lookup(TOKENS, lookup_id="a", pin=True),
        "lookup_unpin": lambda: engine.lookup_unpin("a"),
        "prefetch": lambda: engine.prefetch(TOKENS),
        "clear": lambda: engine.clear(),
        "statistics": lambda: engine.statistics(),
        "metrics": lambda: engine.metrics(),
        "attach": lambda: engine.attach(tensors),
        "enter": lambda: engine.__enter__(),
        "close": lambda: engine.close(),
        "get_or_create": lambda: LMCacheEngineBuilder.get_or_create("a"),
        "get": lambda: LMCacheEngineBuilder.get("a"),
        "destroy": lambda: LMCacheEngineBuilder.destroy("a"),
        "destroy and clear": lambda: LMCacheEngineBuilder.destroy("a", clear=True),
    }


def own_engine():
    """In the child: store and look up with its own engine, under an id that the parent does not use."""
    engine = LMCacheEngineBuilder.get_or_create("child", config_of(None), kv_caches=paged())
    engine.store(TOKENS, slot_mapping=SLOTS)
    found = engine.lookup(TOKENS), engine.retrieve(TOKENS, slot_mapping=SLOTS).sum().item()
    LMCacheEngineBuilder.destroy("child")
    return found


def child(engine, closed, tensors, write):
    told = {name: outcome(call) for name, call in calls_of(engine, tensors).items()}
    told["close of a closed engine"] = outcome(closed.close)

    def leave():
        with engine_of_the_parent(engine):
            raise ValueError("the block's own error")

    told["leave"] = outcome(leave)
    told["own engine"] = outcome(own_engine)
    os.write(write, json.dumps(told).encode())


def engine_of_the_parent(engine):
    """The rest of a `with` block that the parent entered before the fork."""

    class Entered:
        __exit__ = staticmethod(engine.__exit__)

        def __enter__(self):
            return engine

    return Entered()


def main(path):
    torch.set_num_threads(1)
    tensors = paged()
    engine = LMCacheEngineBuilder.get_or_create("a", config_of(path), kv_caches=tensors)
    engine.store(TOKENS, slot_mapping=SLOTS)
    closed = LMCacheEngine(config_of(None))
    closed.close()
    held = HeldLayers(tensors)
    holder = threading.Thread(
        target=LMCacheEngineBuilder.get_or_create, args=("a",), kwargs={"kv_caches": held}
    )
    holder.start()
    held.read.wait()  # from here on, the locks of the builder and the engine are held

    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        child(engine, closed, tensors, write)
        LMCacheEngineBuilder._engines.clear()
        del engine, closed
        gc.collect()
        sys.exit(7)  # a regular interpreter exit

    os.close(write)
    with os.fdopen(read) as pipe:
        told = json.load(pipe)
    _, status = os.waitpid(process, 0)
    held.go_on.set()
    holder.join()
    for tensor in tensors:
        tensor.zero_()
    engine.clear(memory_only=True)
    parent = {
        "exit": os.waitstatus_to_exitcode(status),
        "lookup": engine.lookup(TOKENS),
        "retrieve": int(engine.retrieve(TOKENS, slot_mapping=SLOTS).sum()),
        "content": all(
            torch.equal(tensor.view(2, 128, 4)[:, :40], whole.view(2, 128, 4)[:, :40])
            for tensor, whole in zip(tensors, paged(), strict=True)
        ),
        "second engine": outcome(lambda: LMCacheEngine(config_of(path), kv_caches=tensors)),
    }
    engine.store(range(100, 140), slot_mapping=SLOTS)
    parent["stored"] = engine.lookup(range(100, 140))
    LMCacheEngineBuilder.destroy("a")
    json.dump({"process": os.getpid(), "child": told, "parent": parent}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
