"""The promises that are taken away one at a time, and which tests must notice each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of the source that breaks a promise.

    Attributes:
        name: What `--only` takes.
        path: The file, relative to the root.
        old: Text that is in the file exactly once.
        new: What stands there instead.
        tests: Files, or single tests of long ones; at least one test of them fails.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


RECORD = "lmcache_async/memory/record.py"
BUFFER = "lmcache_async/memory/buffer.py"
ARENA = "lmcache_async/memory/arena.py"
GUARD = "lmcache_async/tiers/layers/guard.py"
WRITER = "lmcache_async/tiers/writer.py"
STACK = "lmcache_async/tiers/stack.py"
RUNNER = "lmcache_async/pipeline/runner.py"
DIRECTORY = "plugins/disk/directory.py"
INDEX = "plugins/disk/index.py"

TEST_RECORD = ("tests/unit/test_record.py",)
TEST_CRASH = ("tests/tiers/test_disk_crash.py",)
TEST_ENGINE = ("tests/unit/test_engine.py",)
TEST_CANCEL = ("tests/cancellation/test_engine_cancellation.py",)
TEST_GUARD = ("tests/tiers/test_guard.py",)
TEST_STACK = ("tests/tiers/test_stack.py",)
TEST_WRITER = ("tests/tiers/test_writer.py",)

RECORDS = (
    Mutation(
        "the payload's checksum is not compared",
        RECORD,
        "if payload and xxhash.xxh3_128_digest(",
        "if False and xxhash.xxh3_128_digest(",
        TEST_RECORD,
    ),
    Mutation(
        "the header's checksum is not compared",
        RECORD,
        "if _header_checksum(header) != checksum:",
        "if False:",
        TEST_RECORD,
    ),
    Mutation(
        "tokens are not compared",
        RECORD,
        "_token_bytes(header.tokens) != _token_bytes(chunk.tokens) or ",
        "",
        TEST_RECORD,
    ),
    Mutation(
        "what belongs to tokens (images) is not compared",
        RECORD,
        " or header.extra != _bounded(chunk.extra)",
        "",
        TEST_RECORD,
    ),
    Mutation(
        "the engine's namespace is not compared",
        RECORD,
        "header.namespace != format.namespace or ",
        "",
        TEST_RECORD,
    ),
    Mutation(
        "the request's namespace is not compared",
        RECORD,
        " or header.request_namespace != _bounded(request_namespace)",
        "",
        TEST_RECORD,
    ),
    Mutation("keys are not compared", RECORD, "if header.key != chunk.key:", "if False:", TEST_RECORD),
    Mutation(
        "layouts are not compared",
        RECORD,
        "header.layout != format.layout or header.dtype",
        "header.dtype",
        TEST_RECORD,
    ),
    Mutation(
        "data types are not compared",
        RECORD,
        " or header.dtype != format.dtype",
        "",
        TEST_RECORD,
    ),
    Mutation(
        "versions are not compared", RECORD, "if version & ~ENCRYPTED != VERSION:", "if False:", TEST_RECORD
    ),
    Mutation(
        "shapes are not compared",
        "stages/verify.py",
        "if header.shape != shape:",
        "if False:",
        ("tests/unit/test_verify_stage.py",),
    ),
    Mutation(
        "what comes from disk is not checksummed",
        "stages/verify.py",
        "return self._verify_arena or not ",
        "return self._verify_arena and not ",
        ("tests/unit/test_engine.py::test_a_flipped_byte_on_disk_ends_the_prefix_and_the_record_is_gone",),
    ),
    Mutation(
        "the request's namespace is not in its keys",
        "lmcache_async/engine/tokens.py",
        "return namespace.root(own.root(), own.algorithm, own.hash_key)",
        "return own.root()",
        ("tests/unit/test_engine.py::test_namespaces_never_share_a_chunk",),
    ),
    Mutation(
        "a payload size from outside is not bounded",
        RECORD,
        "if payload_bytes > MAX_PAYLOAD_BYTES:",
        "if False:",
        TEST_RECORD,
    ),
)

DISK = (
    Mutation(
        "records are written in place",
        "plugins/disk/io.py",
        "name = self._directory.temporary_name(job.key)\n",
        "name = self._directory.record_name(job.key)\n"
        "        with contextlib.suppress(OSError):\n"
        "            os.mkdir(name[:2], 0o700, dir_fd=self._directory.fd)\n",
        TEST_CRASH,
    ),
    Mutation(
        "the start does not list what is there",
        DIRECTORY,
        "return list(self._scan())",
        "return []",
        TEST_CRASH,
    ),
    Mutation(
        "the start does not look for files cut by a power failure",
        DIRECTORY,
        "return self.nbytes > 0 and self.nbytes % PAGE == 0",
        "return True",
        ("tests/tiers/test_disk.py::test_a_file_that_is_no_whole_pages_is_removed_at_the_start",),
    ),
    Mutation(
        "the start does not sweep what dead writers left",
        DIRECTORY,
        'os.unlink(f"tmp/{name}", dir_fd=self.fd)',
        "pass",
        TEST_CRASH,
    ),
    Mutation(
        "a directory may have two owners",
        "plugins/disk/lock.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("tests/tiers/test_disk.py::test_a_second_owner_is_refused_until_the_first_has_closed",),
    ),
    Mutation(
        "others may read records",
        "plugins/disk/io.py",
        "return os.open(name, flags, 0o600, ",
        "return os.open(name, flags, 0o644, ",
        ("tests/tiers/test_disk.py::test_only_the_owner_may_read",),
    ),
    Mutation(
        "disk capacity is not checked",
        INDEX,
        "missing = max(self.used_bytes + nbytes - self.max_bytes, evict_bytes)",
        "missing = evict_bytes",
        ("tests/tiers/test_disk_index.py",),
    ),
    Mutation(
        "a record being read may be evicted",
        INDEX,
        " and k not in self._readers",
        "",
        ("tests/tiers/test_disk_index.py",),
    ),
    Mutation(
        "a cancelled disk call does not wait for its thread",
        "plugins/disk/workers.py",
        "if not future.cancel() and not abandon:",
        "if False:",
        ("tests/tiers/test_disk.py::test_a_cancelled_get_keeps_its_buffer_until_the_thread_has_ended",),
    ),
)

LEASES = (
    Mutation(
        "the writer does not give its lease back",
        WRITER,
        "        item.buffer.release()\n",
        "",
        TEST_WRITER,
    ),
    Mutation(
        "the guard does not give its leases of a put back",
        GUARD,
        "finally_=lambda: _release([b for _, b in kept])",
        "finally_=None",
        TEST_GUARD,
    ),
    Mutation(
        "the guard keeps what arrives late",
        GUARD,
        "                discard(task.result())",
        "                pass",
        TEST_GUARD,
    ),
    Mutation(
        "a batch does not give its leases back",
        RUNNER,
        "run.batches[index].scope.close()",
        "pass",
        TEST_CANCEL,
    ),
    Mutation(
        "a cancelled fetch keeps what it has got",
        STACK,
        "            release_all(got)\n            raise",
        "            raise",
        TEST_STACK,
    ),
    Mutation(
        "what lies behind a hole is not given back",
        STACK,
        "release_all(got[count:])",
        "pass",
        TEST_STACK,
    ),
    Mutation(
        "a slab is used again while a view of it lives",
        BUFFER,
        "if self._bytes is None:\n                self._owner",
        "if True:\n                self._owner",
        ("tests/unit/test_buffer.py",),
    ),
    Mutation(
        "a cancelled wait for memory keeps its slabs",
        ARENA,
        "self._free.extend(waiter.slabs)",
        "pass",
        ("tests/unit/test_arena.py::test_cancelled_in_the_turn_of_its_grant_it_gives_the_slab_on",),
    ),
    Mutation(
        "memory evicts what is in use",
        "plugins/cpu/tier.py",
        "return buffer is not None and not buffer.shared",
        "return buffer is not None",
        ("tests/tiers/test_cpu.py",),
    ),
    Mutation(
        "memory's capacity is not checked",
        "plugins/cpu/tier.py",
        "if len(self._chunks) >= self._max_slabs and",
        "if False and",
        ("tests/tiers/test_cpu.py",),
    ),
)

WAITS = (
    Mutation(
        "a tier's call has no deadline",
        GUARD,
        "await asyncio.wait({task}, timeout=self._timeout_s)",
        "await asyncio.wait({task})",
        TEST_GUARD,
    ),
    Mutation(
        "a run has no deadline",
        RUNNER,
        "async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:",
        "async with asyncio.timeout(None), asyncio.TaskGroup() as group:",
        ("tests/unit/test_runner.py",),
    ),
    Mutation(
        "a wait for memory has no deadline",
        ARENA,
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(None):",
        ("tests/unit/test_arena.py::test_a_deadline_ends_the_wait_and_hangs_nobody",),
    ),
    Mutation(
        "a cancelled copy is not waited for",
        "lmcache_async/device/copier.py",
        "                on_cancel()\n",
        "                on_cancel()\n            raise\n",
        TEST_CANCEL,
    ),
    Mutation(
        "the prefix is not cut where a chunk vanished",
        STACK,
        "count = next((i for i, buffer in enumerate(got) if buffer is None), len(got))",
        "count = len(got)",
        TEST_STACK,
    ),
    Mutation(
        "a retrieve goes on behind a hole",
        "lmcache_async/engine/runners.py",
        "ends=lambda report: bool(report.cause),",
        "ends=lambda report: False,",
        TEST_ENGINE,
    ),
    Mutation(
        "a plan goes on behind a hole",
        STACK,
        "found = cover.tiers[: cover.prefix]",
        "found = cover.tiers",
        ("tests/tiers/test_plan.py",),
    ),
)

MUTATIONS = RECORDS + DISK + LEASES + WAITS
