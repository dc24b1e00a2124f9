"""What may be found and what must be found of a prompt: the model of CacheMachine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Prompts:
    """The prompts of one namespace.

    Attributes:
        may_be: Prompts whose store was begun, as token ids; nothing else may be found.
        must_be: Those that were stored and that nothing has taken away.
    """

    def __init__(self, chunk_size: int) -> None:
        self.may_be: set[tuple[int, ...]] = set()
        self.must_be: set[tuple[int, ...]] = set()
        self._chunk_size = chunk_size

    def longest(self, tokens: Sequence[int]) -> int:
        """The longest prefix that may be found."""
        return self._longest(tokens, self.may_be)

    def shortest(self, tokens: Sequence[int]) -> int:
        """The shortest prefix that may be found: less than that is a loss."""
        return self._longest(tokens, self.must_be)

    def forget(self) -> None:
        self.may_be.clear()
        self.must_be.clear()

    def _longest(self, tokens: Sequence[int], prompts: Iterable[tuple[int, ...]]) -> int:
        """Whole chunks of some prompt, or one of its tails where `tokens` end there or go on with a chunk."""
        best, size = 0, self._chunk_size
        for prompt in prompts:
            common = 0
            while common < min(len(prompt), len(tokens)) and prompt[common] == tokens[common]:
                common += 1
            whole = common - common % size
            tail_too = common == len(prompt) and (common == len(tokens) or common % size == 0)
            best = max(best, common if tail_too else whole)
        return best
