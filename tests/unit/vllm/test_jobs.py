from __future__ import annotations

import pickle
from array import array

import numpy as np

from lmcache_async.integration.vllm.events import MemoryChange
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.jobs import SKIP, Job, JobPart, StepMetadata, WorkerReport


def part(num_tokens: int = 10, *, group: int = 0, blocks: tuple[int, ...] = (5, SKIP, 7, 8, 9)) -> JobPart:
    return JobPart(
        group=group,
        start=8,
        tokens=array("i", range(num_tokens)).tobytes(),
        keys=(b"a" * 16 + b"b" * 16 + b"c" * 16, b"x" * 48),
        texts=((1, "image"),),
        block_ids=array("q", blocks).tobytes(),
    )


def job(*parts: JobPart) -> Job:
    return Job(job_id=1, request_id="r", request_namespace="tenant", epoch=0, parts=parts or (part(),))


def test_a_part_splits_into_its_rank_s_chunks_with_their_blocks():
    parts = list(part().chunks(0, chunk_size=4, block_size=2))
    others = part().chunks(1, chunk_size=4, block_size=2)

    assert [chunk.key for chunk, _ in parts] == [b"a" * 16, b"b" * 16, b"c" * 16]
    assert [chunk.key for chunk, _ in others] == [b"x" * 16] * 3
    assert [(chunk.start, chunk.stop) for chunk, _ in parts] == [(8, 12), (12, 16), (16, 18)]
    assert [chunk.extra for chunk, _ in parts] == ["", "image", ""]
    assert [rows.tolist() for _, rows in parts] == [[5, SKIP], [7, 8], [9]]
    assert np.concatenate([chunk.tokens for chunk, _ in parts]).tolist() == list(range(10))


def test_the_first_failed_token_is_that_of_the_group_with_the_largest_loss():
    groups = KVGroups((KVGroup(0, 2), KVGroup(1, 5)))
    both = job(part(), part(group=1, blocks=(20, 21)))

    assert both.touched_blocks() == [5, 7, 8, 9, 20, 21]
    assert both.first_token_in({21, 9}, groups) == 13
    assert both.first_token_in({8, 21}, groups) == 13
    assert both.first_token_in({8}, groups) == 14
    assert both.first_token_in({6}, groups) is None


def test_metadata_can_be_pickled_and_is_small():
    data = pickle.dumps(StepMetadata(loads=(job(),), stores=(job(),)))

    assert pickle.loads(data) == StepMetadata(loads=(job(),), stores=(job(),))
    assert len(data) < 1100


def test_reports_of_ranks_add_up_and_are_truthy_or_vllm_would_drop_them():
    changes = [MemoryChange("cpu", bytes([rank]) * 16, b"") for rank in (0, 1)]
    one, other = (
        WorkerReport({1: 1, 2: 1}, {1: 1, 2: 1}, {1: 0, 2: 1}, memory={0: changes[0]}, step=7),
        WorkerReport({2: 1, 3: 1}, {1: 1, 3: 1}, {1: 0, 2: 2}, memory={1: changes[1]}, step=7),
    )

    assert one
    assert one.aggregate(other) == WorkerReport(
        {1: 1, 2: 2, 3: 1}, {1: 2, 2: 1, 3: 1}, {1: 0, 2: 3}, memory=dict(enumerate(changes)), step=7
    )
