"""Mutations that serve wrong bytes or lose stored records."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

RECORD = "lmcache_async/memory/record.py"
HEADER = "lmcache_async/memory/header.py"
DIRECTORY = "plugins/disk/directory.py"
INDEX = "plugins/disk/index.py"
FILES = "plugins/disk/files.py"
TIER = "plugins/disk/tier.py"
TEST_RECORD = ("tests/unit/test_record.py",)
TEST_BESIDE_ANOTHER = ("tests/unit/vllm/test_multi_connector.py",)
TEST_LEFT_BEHIND = (
    "tests/unit/vllm/test_simulated.py::test_blocks_of_a_failed_layerwise_load_are_never_read",
)
TEST_CRASH = ("tests/tiers/test_disk_crash.py::test_a_directory_survives_kill_9_before_every_system_call",)

LAYERWISE = (
    Mutation(
        "blocks that a step is still to fill are shared",
        "lmcache_async/integration/vllm/scheduler.py",
        "if self._may_be_unfilled(tracker, now):",
        "if False:",
        TEST_LEFT_BEHIND,
    ),
    Mutation(
        "blocks of a layer-wise load that failed stay in vLLM's prefix cache",
        "lmcache_async/integration/vllm/scheduler.py",
        "self._manager.evict_blocks(bad | self._blocks_after(request_id, first_token))",
        "bad.clear()",
        TEST_LEFT_BEHIND,
    ),
    Mutation(
        "blocks that another connector still loads are shared with the next step",
        "lmcache_async/integration/vllm/others.py",
        "starting or any(now < load.until for load in shared)",
        "starting",
        TEST_BESIDE_ANOTHER,
    ),
    Mutation(
        "blocks that another connector loads are stored",
        "lmcache_async/integration/vllm/others.py",
        "                tracker.stop_storing()\n                start =",
        "                start =",
        TEST_BESIDE_ANOTHER,
    ),
    Mutation(
        "blocks that another connector loads for an aborted request are stored",
        "lmcache_async/integration/vllm/request.py",
        "self._request.num_tokens) if self._in_step else 0",
        "self._request.num_tokens)",
        TEST_BESIDE_ANOTHER,
    ),
    Mutation(
        "blocks that another connector failed to load stay in vLLM's prefix cache",
        "lmcache_async/integration/vllm/others.py",
        "self._evict(set(load.blocks))",
        "pass",
        ("tests/unit/vllm/test_scheduler.py",),
    ),
    Mutation(
        "a layer is not awaited",
        "lmcache_async/integration/vllm/connector.py",
        "_guarded(self.worker, lambda side: side.wait_for_layer(layer_name), None)",
        "del layer_name",
        ("tests/unit/vllm/test_simulated.py::test_a_hit_has_all_of_a_prompt_that_vllm_can_use",),
    ),
    Mutation(
        "a forward pass that did not wait for every layer counts as loaded",
        "lmcache_async/integration/vllm/worker.py",
        "if self._layers_left:",
        "if False:",
        ("tests/unit/vllm/test_worker.py",),
    ),
)

RECORDS = (
    Mutation(
        "the payload's checksum is not compared",
        RECORD,
        "if payload and payload_checksum(",
        "if False and payload_checksum(",
        TEST_RECORD,
    ),
    Mutation(
        "the header's checksum is not compared",
        HEADER,
        "if header_checksum(header) != checksum:",
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
        "the extra dependencies of tokens (images) are not compared",
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
        "versions are not compared", HEADER, "if version & ~ENCRYPTED != VERSION:", "if False:", TEST_RECORD
    ),
    Mutation(
        "shapes are not compared",
        "stages/verify.py",
        "if header.shape != shape:",
        "if False:",
        ("tests/unit/test_engine_integrity.py",),
    ),
    Mutation(
        "records from disk are not verified",
        "stages/verify.py",
        "return self._verify_arena or not ",
        "return self._verify_arena and not ",
        ("tests/unit/test_engine_integrity.py",),
    ),
    Mutation(
        "the request's namespace is not in its keys",
        "lmcache_async/engine/engine.py",
        "return namespace.root(self._engine_root, own.algorithm, own.hash_key)",
        "return self._engine_root",
        ("tests/security/test_namespaces.py::test_two_namespaces_share_nothing",),
    ),
    Mutation(
        "a payload size from outside is not bounded",
        HEADER,
        "if payload_bytes > MAX_PAYLOAD_BYTES:",
        "if False:",
        TEST_RECORD,
    ),
    Mutation(
        "the payload of a sealed record is not compared",
        RECORD,
        "return payload is None or payload_checksum(payload) == checksum",
        "return True",
        TEST_RECORD,
    ),
    Mutation(
        "the fields of a sealed record are not compared",
        RECORD,
        "if header != template.header(chunk, checksum):",
        "if False:",
        TEST_RECORD,
    ),
    Mutation(
        "the copy's checksums are used behind a stage that changes payloads",
        "stages/device_to_host.py",
        '("device_to_host", "seal") in pairwise(config.store.stages)',
        "bool(pairwise(config.store.stages))",
        ("tests/unit/test_seal_stage.py",),
    ),
)

OUTSIDE = (
    Mutation(
        "an encrypted record's tag is not checked",
        "lmcache_async/memory/encryption.py",
        "cipher.finalize_with_tag(tag)",
        "pass",
        ("tests/security/test_encryption.py",),
    ),
    Mutation(
        "records that a later stage has decrypted leave memory",
        "lmcache_async/tiers/stack.py",
        "(at_rest is None or not all(is_encrypted(one.view) for one in at_rest))",
        "at_rest is None",
        ("tests/security/test_encrypted_stack.py",),
    ),
    Mutation(
        "a message's length is not bounded before it is read",
        "lmcache_async/integration/vllm/lookup_server.py",
        "if length > MAX_MESSAGE_BYTES:",
        "if False:",
        ("tests/unit/vllm/test_lookup_protocol.py", "tests/fuzz/test_wire.py"),
    ),
    Mutation(
        "other users may connect to the socket",
        "lmcache_async/integration/vllm/lookup_server.py",
        "if user != os.geteuid():",
        "if False:",
        ("tests/security/test_lookup_socket.py",),
    ),
)

DISK = (
    Mutation(
        "records are written in place",
        FILES,
        "name = self._directory.temporary_name(key)\n",
        "name = self._directory.record_name(key)\n"
        "            with contextlib.suppress(OSError):\n"
        "                os.mkdir(name[:2], 0o700, dir_fd=self._directory.fd)\n",
        TEST_CRASH,
    ),
    Mutation(
        "the start does not list existing records",
        DIRECTORY,
        "return list(self.scan())",
        "return []",
        TEST_CRASH,
    ),
    Mutation(
        "the start does not detect files truncated by a power failure",
        TIER,
        "if 0 < each.nbytes <= MAX_RECORD_BYTES and each.nbytes % PAGE == 0]",
        "if each.nbytes <= MAX_RECORD_BYTES]",
        ("tests/tiers/test_disk.py::test_a_file_of_incomplete_pages_is_removed_at_the_start",),
    ),
    Mutation(
        "the start does not delete files of dead writers",
        DIRECTORY,
        'os.unlink(f"{TEMPORARY_FOLDER}/{name}", dir_fd=self.fd)',
        "pass",
        TEST_CRASH,
    ),
    Mutation(
        "a directory may have two owners",
        DIRECTORY,
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("tests/tiers/test_disk_owner.py",),
    ),
    Mutation(
        "others may read records",
        FILES,
        "return os.open(name, flags, 0o600, ",
        "return os.open(name, flags, 0o644, ",
        ("tests/tiers/test_disk_owner.py::test_every_created_directory_and_file_is_private",),
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
        TIER,
        "            await wait_done(batch.ended)",
        "            pass",
        ("tests/tiers/test_disk.py::test_a_cancelled_get_keeps_its_buffer_until_the_thread_has_ended",),
    ),
)
