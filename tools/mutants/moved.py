"""Mutations after which a tool could let in, keep or lose the wrong record."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

TEST_COPY = ("tests/records/test_copy.py",)
TEST_VERIFY = ("tests/records/test_verify.py",)

MOVED = (
    Mutation(
        "a damaged record is copied",
        "lmcache_async/records/copy.py",
        "if checked.cause or checked.looked is None:",
        "if checked.looked is None:",
        TEST_COPY,
    ),
    Mutation(
        "the least recently used records are copied first",
        "lmcache_async/records/copy.py",
        "newest_first = sorted(kept, key=lambda one: one.rank, reverse=True)",
        "newest_first = sorted(kept, key=lambda one: one.rank)",
        TEST_COPY,
    ),
    Mutation(
        "beginnings of prompts go before their ends",
        "lmcache_async/records/collecting.py",
        "for one in sorted(selected, key=lambda one: one.rank):",
        "for one in sorted(selected, key=lambda one: one.rank, reverse=True):",
        ("tests/records/test_gc.py",),
    ),
    Mutation(
        "a directory that an engine holds is changed",
        "plugins/disk/rest.py",
        "            self._directory.prepare()\n",
        "            self._directory.look()\n",
        ("tests/records/test_beside_an_engine.py",),
    ),
    Mutation(
        "a key is not computed again",
        "lmcache_async/records/proving.py",
        "if any(digest(parent + end) == header.key for parent in self._candidates(header.key)):",
        "if True:",
        TEST_VERIFY,
    ),
    Mutation(
        "a record of other tokens is warmed",
        "lmcache_async/records/warming.py",
        "return checked if same else",
        "return checked if True else",
        ("tests/records/test_warm.py",),
    ),
)
