"""Validation of chains when they are built."""

import pytest

from lmcache_async.errors import ChainError
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.stage import build_stage


async def double(n: int) -> int:
    return 2 * n


async def show(n: int) -> str:
    return str(n)


class Whole:
    per_request = True

    async def __call__(self, n: int) -> int:
        return n + 1


async def bare(n):
    return n


def plain(n: int) -> int:
    return n


class NeedsArena:
    def __init__(self, arena: str, optional: int = 3) -> None:
        self.arena = arena
        self.optional = optional

    async def __call__(self, n: int) -> int:
        return n


async def test_a_chain_passes_each_stages_result_to_the_next():
    chain = Chain.of(double).then(double).then(show)

    assert await chain(3) == "12"
    assert repr(chain) == "double → double → show"


async def unresolved(batch: "Batch") -> "Batch":  # noqa: F821  # as if imported under TYPE_CHECKING only
    return batch


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "at least one stage"),
        ([bare], "'bare' must take one annotated batch"),
        (
            [unresolved],
            "stage 'unresolved': name 'Batch' is not defined; import the types of its annotations",
        ),
        ([plain], r"'plain' .* is not an async function"),
        ([show, double], "stage 'show' gives str, but stage 'double' after it takes int"),
        ([double, Whole()], "'Whole' takes a whole request and cannot stand after stage 'double'"),
    ],
)
def test_a_chain_that_cannot_work_is_refused_with_the_names_of_its_stages(stages, message):
    with pytest.raises(ChainError, match=message):
        Chain.named([(getattr(stage, "__name__", type(stage).__name__), stage) for stage in stages])


def test_ends_that_do_not_fit_are_named():
    chain = Chain.named([("double", double)])

    with pytest.raises(ChainError, match="first stage 'double' takes int"):
        chain.check_ends(str, int)
    with pytest.raises(ChainError, match="must end in str, but its last stage 'double' gives int"):
        chain.check_ends(int, str)


def test_a_stage_class_gets_the_resources_it_names():
    stage = build_stage("needs", NeedsArena, {"arena": "the arena", "stack": None})

    assert stage.arena == "the arena"
    assert stage.optional == 3


def test_an_unknown_resource_is_named_with_those_there_are():
    with pytest.raises(ChainError, match="stage 'needs' requests 'arena'; an engine has copier, stack"):
        build_stage("needs", NeedsArena, {"stack": None, "copier": None})
