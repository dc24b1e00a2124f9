"""Two vLLMs share prefixes through a tier's server. Killing an engine or a server does not change any answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.shared_servers import PATIENCE_S, SERVERS, SharedServer
from tests.integration.vllm_answers import Answer, Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, connector
from tests.support.processes import started
from tools.torture.outcome import Outcome
from tools.torture.vllm import compare, rounds

pytestmark = pytest.mark.vllm

SHORT_S = 2.0
"""Deadlines of the engine whose server hangs. Without them a call would take `PATIENCE_S`."""
BREAKER = {"name": "breaker", "pause_s": 0.5, "max_pause_s": 0.5}
"""Settings to retry a failed tier soon."""
QUESTION = Question(tokens("shared", 730))
MAX_ROUNDS = 40


class Shared:
    """Shared tier with a real server and two engines, the second one started after the first had stored."""

    def __init__(self, engines: Engines, server: SharedServer) -> None:
        self.server = server
        self.tier = str(server.tier["name"])
        self._engines = engines
        self.first = self.start()
        self.cold = self.first.ask(QUESTION)
        self.first.settle()
        self.second = self.start()
        self.warm = self.second.ask(QUESTION)

    def start(self, timeout_s: float = PATIENCE_S, *layers: object) -> Engine:
        """Start an engine. With the default timeouts, a busy machine would cost hits."""
        transfer = connector(
            **{
                "retrieve.timeout_s": timeout_s,
                "store.timeout_s": PATIENCE_S,
                "vllm.lookup_timeout_s": timeout_s,
                "vllm.reset_cache": "memory",
            }
        )
        layers = ("metrics", "retry", *layers, {"name": "deadline", "lookup_s": timeout_s})
        tier = self.server.tier | {"timeout_s": timeout_s, "layers": layers}
        transfer["kv_connector_extra_config"]["tiers"].append(tier)
        return self._engines.start(transfer)

    def close(self) -> None:
        for engine in (self.first, self.second):
            engine.kill()

    def tokens_of(self, answers: Sequence[Answer]) -> int:
        """Number of tokens of these answers loaded from the shared tier. Their log is that of the first one."""
        return answers[0].tiers.get(self.tier, 0)


@pytest.fixture(scope="module", params=SERVERS)
def shared(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    with started(SERVERS[request.param](tmp_path_factory.mktemp(request.param))) as server:
        shared = Shared(engines, server)
        yield shared
        shared.close()


def ask(
    engine: Engine, reference: Reference, questions: Sequence[Question], outcome: Outcome
) -> list[Answer]:
    """Ask all questions at once, then empty the engine's memory, so that only the shared tier has the records."""
    expected = [reference(question) for question in questions]
    answers = engine.ask_all(questions)
    check(questions, answers, expected, outcome)
    engine.forget()
    return answers


def check(
    questions: Sequence[Question],
    answers: Sequence[Answer],
    expected: Sequence[Answer],
    outcome: Outcome,
) -> None:
    """Compare answers. None may be as late as a call that hangs."""
    for question, answer, right in zip(questions, answers, expected, strict=True):
        compare(question, answer, right, outcome, deadline_s=PATIENCE_S / 2)


def test_the_first_request_of_the_second_engine_is_a_hit(shared: Shared, reference: Reference) -> None:
    assert shared.cold.cached_tokens == 0
    assert shared.warm.tiers == {shared.tier: 704}
    assert shared.warm.cached_tokens == 704
    for answer in (shared.cold, shared.warm):
        assert_same(answer, reference(QUESTION))


def test_each_engine_finds_the_chunks_that_the_other_one_stored(shared: Shared, reference: Reference) -> None:
    outcome = Outcome("vllm")
    grown = [Question(tokens("grows", 320 * turn + 40)) for turn in range(1, 5)]

    found = [
        shared.tokens_of(ask(engine, reference, [question], outcome))
        for engine, question in zip(itertools.cycle([shared.first, shared.second]), grown, strict=False)
    ]

    assert outcome.problems == []
    assert found == [0, 352, 672, 992]  # whole blocks of the prompt and the previous answer


@contextmanager
def traffic(engine: Engine, reference: Reference, parts: Sequence[Any], outcome: Outcome) -> Iterator[None]:
    """Query the engine repeatedly, from one round before the block to one round after it."""
    for part in parts:
        for question in part:
            reference(question)  # computed first: the reference engine serves one caller at a time
    in_traffic, may_end = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for part in itertools.cycle(parts):
                last = may_end.is_set()
                ask(engine, reference, part, outcome)
                in_traffic.set()
                if last:
                    return
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)
            in_traffic.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        in_traffic.wait()
        yield
    finally:
        may_end.set()
        thread.join()
    if failures:
        raise failures[0]


def test_an_engine_killed_and_started_again_in_mid_traffic_changes_no_answer(
    shared: Shared, reference: Reference
) -> None:
    outcome = Outcome("vllm")
    parts = list(itertools.islice(rounds(11), 4))
    own = parts[0]
    expected = [reference(question) for question in own]

    with traffic(shared.second, reference, parts, outcome):
        *_, name = shared.first.add(*own)
        shared.first.step_until("RUNNING", name)
        shared.first.kill()
        shared.first = shared.start()
        answers = shared.first.ask_all(own)
        check(own, answers, expected, outcome)
        shared.first.settle()
    hits = shared.tokens_of(answers)
    for _ in range(MAX_ROUNDS):
        if hits:
            break
        ask(shared.second, reference, own, outcome)
        hits += shared.tokens_of(ask(shared.first, reference, own, outcome))

    assert outcome.problems == []
    assert outcome.counts["requests"] >= 12
    assert hits > 0


def test_a_server_that_hangs_is_killed_and_started_again_in_mid_traffic_changes_no_answer(
    shared: Shared, reference: Reference
) -> None:
    outcome = Outcome("vllm")
    engine = shared.start(SHORT_S, BREAKER)
    parts = list(itertools.islice(rounds(12), 3))
    for part in parts:
        ask(engine, reference, part, outcome)
    for part, harm in zip(parts, (shared.server.hang, shared.server.kill, shared.server.start), strict=True):
        expected = [reference(question) for question in part]
        position = engine.log_size
        names = engine.add(*part)
        engine.call("step")
        harm()  # during lookups, loads and computation
        engine.call("run")
        check(part, [engine.take(name, position) for name in names], expected, outcome)
    engine.forget()  # not earlier: a put keeps its memory until the hanging server has ended

    for seed, each in enumerate((engine, shared.first, shared.second), start=13):
        assert hits_again(shared, each, reference, seed, outcome), (
            f"the tier {shared.tier} was not used again"
        )
    engine.kill()

    assert outcome.problems == []


def hits_again(shared: Shared, engine: Engine, reference: Reference, seed: int, outcome: Outcome) -> bool:
    """Ask the same questions until the engine finds the records that it has stored."""
    questions = next(rounds(seed))
    asked = (ask(engine, reference, questions, outcome) for _ in range(MAX_ROUNDS))
    return any(shared.tokens_of(answers) for answers in asked)
