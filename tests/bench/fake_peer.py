"""A peer's file as `peer_child` imports it."""

from __future__ import annotations

import contextlib
import os

from lmcache_async.bench.peer_child import QUIET
from lmcache_async.bench.peer_work import HASH_LIST, LOOKUP, RETRIEVE, STORE

prepared: list[str] = []
using: list[str] = []


def tasks(work):
    assert QUIET.items() <= os.environ.items()

    def ready(name, seconds):
        @contextlib.contextmanager
        def prepare():
            assert not using
            prepared.append(name)
            using.append(name)
            yield lambda: seconds * len(prepared)
            using.remove(name)

        return prepare

    return {
        HASH_LIST: ready(HASH_LIST, 1.0),
        STORE: ready(STORE, float(work.form.tokens)),
        RETRIEVE: _broken,
        LOOKUP: lambda: os._exit(3),
    }


def _broken():
    raise ValueError("no memory\nat all")
