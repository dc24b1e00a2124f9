"""What batch verbs answer: one result a chunk, some of them leased buffers."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer


def release_answers(answers: Sequence[object]) -> None:
    """Give back the buffers among them."""
    for answer in answers:
        if isinstance(answer, Buffer):
            answer.release()


def check_answers(verb: str, answers: Sequence[object], asked: int) -> None:
    """There is one for each chunk; else the buffers among them are given back.

    Raises:
        TierError: The tier inside breaks its contract.
    """
    if len(answers) != asked:
        release_answers(answers)
        raise TierError(f"{verb} gave {len(answers)} answers for {asked} chunks")


def memory_was_short(error: BaseException) -> bool:
    """Whether it was our own memory that a call did not get, which says nothing of the backend."""
    return isinstance(error, BudgetExceededError) or isinstance(error.__cause__, BudgetExceededError)
