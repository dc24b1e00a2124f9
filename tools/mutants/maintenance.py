"""Mutations of the maintenance commands that accept, keep or lose the wrong record."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

TEST_COPY = ("tests/maintenance/test_copy.py",)

MAINTENANCE = (
    Mutation(
        "a damaged record is copied",
        "lmcache_async/maintenance/copy.py",
        "            if info.cause:\n                self._leave(info)\n            elif self._reserve(nbytes):",
        "            if self._reserve(nbytes):",
        TEST_COPY,
    ),
    Mutation(
        "the least recently used records are copied first",
        "lmcache_async/maintenance/copy.py",
        "newest_first = sorted(records, key=lambda one: one.use_order, reverse=True)",
        "newest_first = sorted(records, key=lambda one: one.use_order)",
        TEST_COPY,
    ),
    Mutation(
        "prefixes are deleted before suffixes",
        "lmcache_async/maintenance/gc.py",
        "for one in sorted(selected, key=lambda one: one.use_order):",
        "for one in sorted(selected, key=lambda one: one.use_order, reverse=True):",
        ("tests/maintenance/test_gc.py",),
    ),
    Mutation(
        "a directory that an engine holds is changed",
        "plugins/disk/offline.py",
        "                self._directory.prepare()\n",
        "                self._directory.open_shared()\n",
        ("tests/maintenance/test_beside_an_engine.py",),
    ),
    Mutation(
        "a record of other tokens is warmed",
        "lmcache_async/maintenance/warmup.py",
        "return found if same else",
        "return found if True else",
        ("tests/maintenance/test_warm.py",),
    ),
)
