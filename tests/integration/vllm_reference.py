"""What the answers are to be: those of a vLLM without connector."""

from __future__ import annotations

from tests.integration.vllm_answers import Answer, Question
from tests.integration.vllm_driver import Engine


class Reference:
    """Computes each question once, from an empty cache."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def __call__(self, question: Question) -> Answer:
        key = (question.prompt, question.max_tokens)
        if key not in self._known:
            assert self._engine.call("reset", connector=False)
            self._known[key] = self._engine.ask(Question(*key))
        return self._known[key]

    def own_hit(self, question: Question) -> Answer:
        """The same from vLLM's own prefix cache."""
        assert self._engine.call("reset", connector=False)
        self._engine.ask(question)
        return self._engine.ask(question)
