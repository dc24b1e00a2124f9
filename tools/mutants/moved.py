"""Mutations after which a tool could let in, keep or lose the wrong record."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

TEST_ARCHIVE = ("tests/records/test_archive.py",)
TEST_VERIFY = ("tests/records/test_verify.py",)

MOVED = (
    Mutation(
        "a record of an archive is let in without its proof",
        "lmcache_async/records/saving.py",
        "if not checked.taken or checked.cause:",
        "if not checked.taken:",
        TEST_ARCHIVE,
    ),
    Mutation(
        "what an archive's frame says of its record is not compared",
        "lmcache_async/records/reader.py",
        'return "" if record_checksum(view) == frame.checksum else "archive"',
        'return ""',
        ("tests/records/test_moving.py::test_wrong_records_are_refused_on_the_way_in",),
    ),
    Mutation(
        "an export goes on behind a torn record",
        "lmcache_async/records/writer.py",
        "isinstance(frame := reader.next(), Frame) and reader.prove(frame, scratch)",
        "isinstance(frame := reader.next(), Frame) and (reader.skip(frame) is None)",
        TEST_ARCHIVE,
    ),
    Mutation(
        "an archive that lost a record is said to be complete",
        "lmcache_async/records/reader.py",
        "if (end.records, end.checksum) == (self.records, self.frames_checksum):",
        "if True:",
        TEST_ARCHIVE,
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
