"""The client's thread with real servers on real sockets; the engine behind them is a set of keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from lmcache_async.engine.lookup import FirstPresent, LookupResult, MemoryLookups
from lmcache_async.engine.loop import LoopThread
from lmcache_async.hashing import ChunkHasher, RequestNamespace, hash_key_id
from lmcache_async.integration.vllm import lookup as lookup_module
from lmcache_async.integration.vllm import lookup_server
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import Adapter, Promise, RequestKeys
from lmcache_async.integration.vllm.lookup import (
    Answer,
    AnsweredLookup,
    Lookup,
    LookupClient,
    Query,
    RankConnection,
)
from lmcache_async.integration.vllm.lookup_server import (
    PROTOCOL,
    Identity,
    LookupServer,
    encode,
    pack_runs,
    receive,
    socket_path,
    unpack_keys,
)
from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.conformance.base import in_time
from lmcache_async.testing.steps import turns

CHUNK, BLOCK = 8, 2
ONE_GROUP = KVGroups((KVGroup(0, BLOCK),))


@dataclass
class KeySet:
    """An engine with exactly these keys."""

    keys: set[bytes] = field(default_factory=set)
    pins: Counter[str] = field(default_factory=Counter)
    gate: threading.Event | SimpleNamespace | None = None
    broken: bool = False
    in_memory: bool = True
    partial_in_memory: bool = True
    chunks_in_memory: int = 1000
    cleared: list[tuple[int, bool]] = field(default_factory=list)
    first_of: list[str | None] = field(default_factory=list)

    async def lookup_keys(self, keys, *, lookup_id=None):
        if self.gate is not None:
            await asyncio.to_thread(self.gate.wait)
        if self.broken:
            raise OSError("the disk is gone")
        count = next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
        self.pins[lookup_id] += 1
        fast = min(count, self.chunks_in_memory)
        by_tier = {tier: chunks for tier, chunks in (("cpu", fast), ("disk", count - fast)) if chunks}
        return LookupResult(count=count, by_tier=by_tier, pinned=count if self.in_memory else 0)

    async def first_present(self, runs, *, lookup_id=None):
        self.first_of.append(lookup_id)
        position = next((at for at, run in enumerate(runs) if self.keys.issuperset(run)), None)
        if position is None:
            return None
        if self.partial_in_memory:
            return FirstPresent(position, len(runs[position]), "cpu")
        return FirstPresent(position, 0, "disk")

    def unpin(self, lookup_id):
        self.pins[lookup_id] -= 1

    async def clear(self, epoch, memory_only):
        if self.gate is not None:
            await asyncio.to_thread(self.gate.wait)
        self.cleared.append((epoch, memory_only))
        self.keys.clear()
        return 0


class Ranks:
    """Two ranks with a server each, and one client."""

    def __init__(
        self,
        directory: Path,
        until: Callable[[Callable[[], bool]], None],
        groups: KVGroups = ONE_GROUP,
    ) -> None:
        self.client: Any = None
        self.until = until
        self.groups = groups
        self.engines = [KeySet(), KeySet()]
        self.roots = [b"0" * 16, b"1" * 16]
        self.paths = [socket_path(directory, "engine", rank) for rank in (0, 1)]
        self.loop = LoopThread("servers")
        self.identities = [
            Identity(
                PROTOCOL,
                root,
                "xxh3_128",
                CHUNK,
                BLOCK,
                group_roots=tuple(bytes([number]) + root[1:] for number in range(len(groups))),
            )
            for root in self.roots
        ]
        self.servers: list[LookupServer] = []
        self.connect()
        self._answers: dict[str, Answer] = {}

    def connect(self, paths: Sequence[Path | None] | None = None, **options: Any) -> None:
        """Make the client, or another one with other options."""
        if self.client is not None:
            self.client.close(5.0)
        given = {"chunk_size": CHUNK, "lookup_timeout_s": 60.0, "groups": self.groups, **options}
        self.client = LookupClient(self.paths if paths is None else paths, **given)

    def serve(self, rank: int) -> None:
        engine = self.engines[rank]
        server = LookupServer(engine, self.identities[rank], self.paths[rank], clear=engine.clear)
        self.loop.submit(server.start()).result()
        self.servers.append(server)

    def serve_all(self) -> None:
        for rank in (0, 1):
            self.serve(rank)
        self.until(lambda: self.client.ready)

    def close(self) -> None:
        self.client.close(5.0)
        for server in self.servers:
            self.loop.submit(server.aclose()).result()
        self.loop.close()

    def send(self, tokens: list[int], **options: Any) -> Lookup:
        return self.client.ask(RequestKeys("r", tokens, len(tokens), **options), len(tokens))

    def ask(self, tokens: list[int], **options: Any) -> Answer:
        return self.wait(self.send(tokens, **options))

    def answer(self, lookup: Lookup) -> Answer | None:
        self._answers.update({one.lookup_id: one.answer for one in self.client.take_answers()})
        return self._answers.get(lookup.lookup_id)

    def wait(self, lookup: Lookup) -> Answer:
        self.until(lambda: self.answer(lookup) is not None)
        return self._answers[lookup.lookup_id]

    def hold(self, tokens: list[int], ranks: Sequence[int] = (0, 1)) -> None:
        """Add all chunks of these tokens to these ranks, including the partial one at the end."""
        for rank in ranks:
            hasher = ChunkHasher(RequestNamespace().root(self.roots[rank]), chunk_size=CHUNK)
            self.engines[rank].keys.update(hasher.extend_keys(tokens))
            self.engines[rank].keys.update(chunk.key for chunk in hasher.partials(BLOCK)[:1])

    def hold_boundary(self, tokens: list[int], boundary: int, ranks: Sequence[int] = (0, 1)) -> None:
        """Add the records of a boundary to these ranks."""
        keys = RequestKeys("r", tokens, len(tokens))
        roots = [identity.group_roots for identity in self.identities]
        keys.open(self.roots, self.identities[0], "", group_roots=roots)
        keys.extend(len(tokens), lambda: None)
        for group in self.groups:
            if not group.is_full:
                for rank, packed in enumerate(keys.boundary_keys(group, boundary)):
                    if rank in ranks:
                        self.engines[rank].keys.update(unpack_keys(packed))


@pytest.fixture
def unserved(socket_dir: Path, until) -> Iterator[Ranks]:
    """A client, and ranks whose servers are not started."""
    made = Ranks(socket_dir, until)
    yield made
    made.close()


@pytest.fixture
def ranks(unserved: Ranks) -> Ranks:
    unserved.serve_all()
    return unserved


PROMPT = list(range(30))
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def test_ranks_on_other_hosts_are_queried_over_tcp_once_their_addresses_are_known(unserved: Ranks):
    addresses = {}
    for rank, engine in enumerate(unserved.engines):
        server = LookupServer(engine, unserved.identities[rank], "127.0.0.1", clear=engine.clear)
        unserved.loop.submit(server.start()).result()
        unserved.servers.append(server)
        assert server.tcp_address is not None
        addresses[rank] = server.tcp_address
        unserved.hold(PROMPT[:16], ranks=[rank])
    unserved.connect([None, None])
    assert unserved.ask(PROMPT).chunks == 0  # not connected

    unserved.client.set_addresses(addresses)
    unserved.until(lambda: unserved.client.ready)

    assert unserved.ask(PROMPT).chunks == 2


def test_chunks_in_memory_of_every_rank_are_resident(ranks: Ranks):
    ranks.hold(PROMPT)
    answer = ranks.ask(PROMPT)
    assert (answer.chunks, answer.partial_tokens, answer.resident) == (3, 6, True)
    assert answer.partial_keys[0] != answer.partial_keys[1]
    assert answer.tiers == {"cpu": 3}

    ranks.engines[1].in_memory = False
    answer = ranks.ask(PROMPT)
    assert (answer.chunks, answer.resident, answer.pinned) == (3, False, True)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_partial_chunk_beyond_a_hole_is_pinned_for_the_same_lookup(ranks: Ranks, until, in_memory: bool):
    ranks.hold(PROMPT[:12])
    for engine in ranks.engines:
        engine.partial_in_memory = in_memory

    lookup = ranks.send(PROMPT)
    answer = ranks.wait(lookup)
    assert (answer.chunks, answer.partial_tokens, answer.resident) == (1, 4, in_memory)

    ranks.client.release(lookup, answer)
    until(lambda: all(engine.pins[lookup.lookup_id] == 0 for engine in ranks.engines))


def test_the_pins_of_a_rank_that_has_more_than_the_others_are_released(ranks: Ranks, until):
    """The first rank pins the end of the prompt. The second one has less, so another partial chunk is looked up."""
    ranks.hold(PROMPT, ranks=[0])
    ranks.hold(PROMPT[:16], ranks=[1])
    for engine in ranks.engines:
        engine.in_memory = False

    lookup = ranks.send(PROMPT)
    answer = ranks.wait(lookup)
    assert (answer.hit_tokens(CHUNK), answer.pinned) == (16, True)

    ranks.client.release(lookup, answer)
    until(lambda: all(engine.pins[lookup.lookup_id] == 0 for engine in ranks.engines))


def test_partial_chunks_that_differ_between_ranks_are_no_hit(ranks: Ranks):
    ranks.hold(PROMPT[:12], ranks=[0])
    ranks.hold(PROMPT[:10], ranks=[1])

    assert ranks.ask(PROMPT).hit_tokens(CHUNK) == CHUNK


def test_lookups_are_immediate_misses_until_every_rank_answers(unserved: Ranks):
    unserved.serve(0)
    unserved.hold(PROMPT, ranks=[0])
    chain = RequestKeys("r", PROMPT, len(PROMPT))

    assert unserved.answer(unserved.client.ask(chain, len(PROMPT))) is not None
    assert not unserved.client.connected


@pytest.mark.parametrize(
    ("ours", "theirs", "chunk_size"),
    [(KEY, OTHER_KEY, CHUNK), (KEY, b"", CHUNK), (b"", KEY, CHUNK), (KEY, KEY, 16)],
)
def test_ranks_with_another_hash_key_or_chunk_size_are_not_queried(
    unserved: Ranks, until, ours: bytes, theirs: bytes, chunk_size: int
):
    unserved.identities = [
        replace(one, algorithm="sha256", hash_key_id=hash_key_id(theirs)) for one in unserved.identities
    ]
    unserved.identities[1] = replace(unserved.identities[1], chunk_size=chunk_size)
    unserved.connect(hash_key=ours)
    for rank in (0, 1):
        unserved.serve(rank)
    until(lambda: all(rank.identity is not None for rank in unserved.client.ranks))

    assert not unserved.client.connected


def test_with_one_secret_both_ends_make_the_same_keys(unserved: Ranks):
    unserved.identities = [
        replace(one, algorithm="blake3", hash_key_id=hash_key_id(KEY)) for one in unserved.identities
    ]
    unserved.connect(hash_key=KEY)
    for engine, root in zip(unserved.engines, unserved.roots, strict=True):
        hasher = ChunkHasher(
            RequestNamespace(cache_salt="s").root(root, "blake3", KEY),
            chunk_size=CHUNK,
            algorithm="blake3",
            hash_key=KEY,
        )
        engine.keys.update(hasher.extend_keys(PROMPT[:16]))
        hasher.extend(PROMPT[16:20])
        engine.keys.update(chunk.key for chunk in hasher.partials(BLOCK)[:1])
    unserved.serve_all()

    answer = unserved.ask(PROMPT, cache_salt="s")

    assert (answer.chunks, answer.partial_tokens) == (2, 4)
    assert unserved.ask(PROMPT, cache_salt="t").chunks == 0


@pytest.mark.parametrize("late", [True, False], ids=["late", "abandoned"])
def test_pins_of_an_answer_that_is_late_or_not_needed_are_released(unserved: Ranks, until, late: bool):
    unserved.connect(lookup_timeout_s=0.01 if late else 60.0)
    unserved.serve_all()
    unserved.hold(PROMPT, ranks=[0])
    unserved.engines[0].gate = threading.Event()
    lookup = unserved.send(PROMPT)

    if late:
        assert unserved.wait(lookup).chunks == 0
    else:
        unserved.client.release(lookup, None)
    unserved.engines[0].gate.set()
    unserved.wait(lookup)
    until(lambda: len(unserved.engines[0].pins) > 0 and not +unserved.engines[0].pins)


@pytest.mark.parametrize(
    ("tokens", "found"),  # of 30 tokens; rank 1 has these
    [(30, {"cpu": 16, "disk": 14}), (24, {"cpu": 16, "disk": 8}), (8, {"cpu": 8}), (4, {"disk": 4}), (0, {})],
)
def test_the_tokens_of_a_hit_are_attributed_to_the_tiers_that_have_them(ranks: Ranks, tokens: int, found):
    """Rank 0 has more of the prompt, which is no part of the hit."""
    for engine in ranks.engines:
        engine.chunks_in_memory, engine.partial_in_memory = 2, False
    ranks.hold(PROMPT)
    ranks.hold(PROMPT[:tokens], ranks=[0])
    ranks.engines[1].keys.clear()
    ranks.hold(PROMPT[:tokens], ranks=[1])

    answer = ranks.ask(PROMPT)

    assert answer.hit_tokens(CHUNK) == tokens
    assert answer.tokens_by_tier(0, tokens, CHUNK) == found


def test_an_answer_tells_whether_the_ranks_were_late(unserved: Ranks, until):
    unserved.connect(lookup_timeout_s=0.01)
    unserved.serve_all()
    unserved.engines[0].gate = threading.Event()
    answers: list[AnsweredLookup] = []

    def answered() -> bool:
        answers.extend(unserved.client.take_answers())
        return bool(answers)

    unserved.send(PROMPT)
    until(answered)
    unserved.engines[0].gate.set()
    assert [one.late for one in answers] == [True]


@pytest.mark.parametrize("stored", [True, False], ids=["late hit", "failed"])
def test_an_answer_has_the_times_of_its_query_and_of_its_arrival(unserved: Ranks, stored: bool):
    """A request repeats a lookup of a certain age. If that were the age of the query alone, a slow one would never end."""
    time = [0.0]
    unserved.connect(clock=lambda: time[0])
    unserved.serve_all()
    unserved.engines[0].broken = not stored
    queried, answers = threading.Event(), threading.Event()
    unserved.engines[0].gate = SimpleNamespace(wait=lambda: queried.set() or answers.wait())
    lookup = unserved.send(PROMPT)
    assert queried.wait(150)
    time[0] = 5.0
    answers.set()

    taken: list[AnsweredLookup] = []
    unserved.until(lambda: bool(taken.extend(unserved.client.take_answers()) or taken))
    assert [(each.lookup_id, each.queried_at, each.answered_at) for each in taken] == [
        (lookup.lookup_id, 0.0, 5.0)
    ]


def test_a_released_lookup_is_unpinned_once_on_every_rank(ranks: Ranks, until):
    ranks.hold(PROMPT, ranks=[0])
    lookup = ranks.send(PROMPT)
    answer = ranks.wait(lookup)

    ranks.client.release(lookup, answer)
    ranks.client.release(lookup, answer)
    ranks.ask(PROMPT)  # an answer sent after the unpin was processed

    until(lambda: all(engine.pins[lookup.lookup_id] == 0 for engine in ranks.engines))


def test_a_rank_that_fails_is_a_miss_and_the_pins_of_the_other_are_released(ranks: Ranks, until):
    ranks.hold(PROMPT)
    ranks.engines[1].broken = True
    lookup = ranks.send(PROMPT)
    answer = ranks.wait(lookup)
    until(lambda: ranks.engines[0].pins[lookup.lookup_id] > 0)
    assert answer.chunks == 0

    ranks.client.release(lookup, answer)

    until(lambda: ranks.engines[0].pins[lookup.lookup_id] == 0)
    ranks.engines[1].broken = False
    assert ranks.ask(PROMPT).chunks == 3


def test_a_lost_connection_is_opened_again(ranks: Ranks, until):
    ranks.hold(PROMPT)
    ranks.loop.submit(ranks.servers.pop().aclose()).result()
    until(lambda: not ranks.client.connected)
    ranks.serve(1)
    until(lambda: ranks.client.connected)

    assert ranks.ask(PROMPT).chunks == 3


def test_the_keys_show_that_an_adapter_was_loaded_again_with_other_weights(ranks: Ranks, until):
    changed = []
    for load_id in (1, 1, 2):
        # An adapter that cannot be read is another one each time it is loaded.
        keys = RequestKeys("r", range(20), 20, adapter=Adapter("sql", "/none", load_id=load_id))
        ranks.client.hash(keys, 20)
        until(lambda keys=keys: keys.num_hashed == 20)
        changed.append(keys.adapter_changed)

    assert changed == [False, False, True]


def test_a_message_to_a_connection_that_was_just_reset_does_not_end_the_client(ranks: Ranks, until):
    """The transport refuses to write from then on, and the reader learns of the end one turn of the loop later."""
    loop, (first, _) = ranks.client._loop, ranks.client.ranks

    def reset_both() -> None:
        assert first._writer is not None
        ranks.client.reset(memory_only=True)
        loop.call_soon(first._writer.transport.abort)

    loop.call_soon_threadsafe(reset_both)
    until(lambda: all(engine.cleared for engine in ranks.engines))
    until(lambda: ranks.client.ready)

    ranks.hold(PROMPT)
    assert ranks.ask(PROMPT).chunks == 3


@pytest.mark.parametrize("op", ["hello", "unpin", "clear"])
def test_an_unexpected_error_of_one_task_does_not_end_the_others(
    unserved: Ranks, monkeypatch: pytest.MonkeyPatch, op: str
):
    monkeypatch.setattr(lookup_module, "LAST_RETRY_S", 0.0)
    post, failed = RankConnection.post, threading.Event()

    def fail_once(rank: RankConnection, message: dict[str, object]) -> None:
        if message["op"] == op and not failed.is_set():
            failed.set()
            raise RuntimeError("a bug of ours")
        post(rank, message)

    monkeypatch.setattr(RankConnection, "post", fail_once)
    unserved.serve_all()
    unserved.engines[0].gate = threading.Event()
    lookup = unserved.send(PROMPT)
    unserved.client.release(lookup, None)  # unpinned by the task that waits for the answer
    unserved.engines[0].gate.set()
    unserved.wait(lookup)
    unserved.client.reset(memory_only=True)
    unserved.until(lambda: unserved.client.ready)
    unserved.hold(PROMPT)

    assert unserved.ask(PROMPT).chunks == 3
    assert failed.is_set()


def test_concurrent_lookups_are_all_answered(ranks: Ranks, until):
    """Each answer reaches its own lookup, although others are sent and answered meanwhile."""
    ranks.hold(PROMPT)
    turn = threading.Semaphore(0)
    ranks.engines[0].gate = SimpleNamespace(wait=turn.acquire)
    chains = [RequestKeys(f"r{number}", PROMPT[: 8 * number], 8 * number) for number in (1, 2, 3)]

    lookups = [ranks.client.ask(chain, len(chain.source)) for chain in chains]
    for count in (1, 2, 3):
        turn.release()
        until(lambda: sum(ranks.answer(lookup) is not None for lookup in lookups) == count)  # noqa: B023

    assert [ranks.wait(lookup).chunks for lookup in lookups] == [1, 2, 3]


@pytest.mark.parametrize("goodbye", [True, False], ids=["ended", "lost"])
def test_closed_connections_are_not_logged(
    ranks: Ranks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    goodbye: bool,
):
    attempts = threading.Semaphore(0)
    connect = asyncio.open_unix_connection

    async def connect_again(path: Path):
        attempts.release()
        return await connect(path)

    monkeypatch.setattr(asyncio, "open_unix_connection", connect_again)
    monkeypatch.setattr(lookup_module, "logger", LimitedLogger(logging.getLogger(lookup_module.__name__)))
    caplog.set_level(logging.INFO)
    if not goodbye:
        monkeypatch.setattr(LookupServer, "_send_goodbyes", lambda server: None)
    caplog.clear()
    ranks.loop.submit(ranks.servers.pop().aclose()).result()
    for _ in range(2):  # after the second attempt, the first one has been recorded
        assert attempts.acquire(timeout=150)

    told = [record.levelname for record in caplog.records if record.name == lookup_module.__name__]
    assert told == ([] if goodbye else ["INFO", "WARNING"])


@pytest.mark.parametrize(("name", "pinned_for"), [("", None), ("r#1", "r#1")])
def test_a_query_without_the_name_of_a_lookup_pins_nothing(ranks: Ranks, name: str, pinned_for: str | None):
    engine = ranks.engines[0]
    message = {"op": "first", "lookup_id": name, "runs": [pack_runs([bytes(16)])]}
    ranks.loop.submit(lookup_server.answer_lookup(message, engine)).result()

    assert engine.first_of == [pinned_for]


def test_a_reset_before_the_thread_of_the_client_runs_is_carried_out(
    unserved: Ranks, monkeypatch: pytest.MonkeyPatch
):
    begins, run = threading.Event(), LookupClient._run
    monkeypatch.setattr(LookupClient, "_run", lambda client: (begins.wait(60), run(client)))
    unserved.connect()
    unserved.client.reset(memory_only=False)
    begins.set()

    unserved.serve_all()  # until lookups are answered
    assert [engine.cleared for engine in unserved.engines] == [[(1, False)]] * 2


def test_resets_of_a_rank_that_is_not_connected_do_not_accumulate(unserved: Ranks):
    """For example if its engine could not be opened, and the weights change often."""
    for _ in range(5):
        unserved.client.reset(memory_only=True)

    unserved.serve_all()  # until lookups are answered
    assert [engine.cleared for engine in unserved.engines] == [[(5, True)]] * 2


def test_lookups_are_misses_until_every_rank_has_cleared(ranks: Ranks, until):
    ranks.hold(PROMPT)
    ranks.engines[1].gate = threading.Event()

    ranks.client.reset(memory_only=True)
    until(lambda: ranks.engines[0].cleared == [(1, True)])

    assert not ranks.client.ready
    assert ranks.ask(PROMPT).chunks == 0
    ranks.engines[1].gate.set()
    until(lambda: ranks.client.ready)
    assert ranks.engines[1].cleared == [(1, True)]


def test_invalid_tokens_give_no_keys_and_do_not_affect_others(ranks: Ranks):
    chain = RequestKeys("bad", [1, -5, 2**40], 3)
    lookup = ranks.client.ask(chain, 3)
    ranks.wait(lookup)

    assert chain.failed
    assert ranks.ask(PROMPT).chunks == 0


def test_further_tokens_of_growing_requests_are_hashed(ranks: Ranks, until):
    tokens = list(range(20))
    chain = RequestKeys("r", tokens, 20)
    ranks.client.ask(chain, 20)
    tokens.extend(range(20, 40))

    ranks.client.hash(chain, 40)
    until(lambda: chain.num_hashed == 40)

    assert chain.key(1, 4) == ChunkHasher(ranks.roots[1], chunk_size=CHUNK).extend_keys(tokens)[4]


@pytest.mark.parametrize("turns_before", range(6))
def test_a_connection_accepted_while_the_server_closes_is_ended(socket_dir: Path, turns_before: int):
    async def close_soon_after_a_connection() -> None:
        path = socket_path(socket_dir, "engine", 0)
        identity = Identity(PROTOCOL, b"0" * 16, "xxh3_128", CHUNK, BLOCK)
        engine = KeySet()
        server = LookupServer(engine, identity, path, clear=engine.clear)
        await server.start()
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        client.connect(str(path))
        await turns(turns_before)
        await server.aclose()
        with client, contextlib.suppress(ConnectionResetError):
            while await asyncio.to_thread(client.recv, 1024):  # it closes the connection
                pass

    # The engine's loop. asyncio's loop in Python 3.11 forgets accepted connections of a closed server.
    uvloop.run(close_soon_after_a_connection())


GROUPS = KVGroups(
    (KVGroup(0, BLOCK), KVGroup(1, BLOCK, window=3 * CHUNK), KVGroup(2, BLOCK, local=4 * CHUNK))
)


@pytest.fixture
def windows(socket_dir: Path, until) -> Iterator[Ranks]:
    made = Ranks(socket_dir, until, GROUPS)
    made.serve_all()
    yield made
    made.close()


@pytest.mark.parametrize("boundary", [10 * CHUNK - 4, 5 * CHUNK], ids=["at the end", "before the end"])
@pytest.mark.parametrize("where", ["in memory", "prefix not", "boundary not"])
def test_a_hit_is_resident_if_every_group_is_in_memory_on_every_rank(
    windows: Ranks, where: str, boundary: int
):
    windows.engines[1].in_memory = where != "prefix not"
    windows.engines[1].partial_in_memory = where != "boundary not"
    tokens = list(range(10 * CHUNK))
    windows.hold(tokens)
    windows.hold_boundary(tokens, boundary)

    answer = windows.ask(tokens)

    assert (answer.boundary, answer.resident) == (boundary, where == "in memory")


def test_leases_of_a_boundary_are_released(windows: Ranks):
    """Also if no record of full attention is leased, or if another rank lacks the boundary."""
    tokens = list(range(10 * CHUNK))
    for engine in windows.engines:
        engine.in_memory = False
    windows.hold(tokens)
    windows.hold_boundary(tokens, 5 * CHUNK)
    windows.hold_boundary(tokens, 8 * CHUNK, ranks=[0])

    assert windows.ask(tokens).pinned
    windows.engines[0].partial_in_memory = windows.engines[1].partial_in_memory = False
    assert not windows.ask(tokens).pinned


def test_an_old_boundary_of_a_long_prompt_is_found_in_a_later_query(windows: Ranks):
    tokens = [7] * (200 * CHUNK)
    windows.hold(tokens)
    windows.hold_boundary(tokens, CHUNK)

    assert windows.ask(tokens).boundary == CHUNK


def in_memory(*engines: KeySet) -> list[Callable[[], MemoryLookups]]:
    """A lookup in host memory of each rank, which has the keys of the rank's engine."""

    def of(engine: KeySet) -> MemoryLookups:
        return MemoryLookups("cpu", lambda keys: sum(1 for _ in takewhile(engine.keys.__contains__, keys)))

    return [partial(of, engine) for engine in engines]


@pytest.mark.parametrize("boundary", [10 * CHUNK - BLOCK, 5 * CHUNK], ids=["at the end", "before the end"])
def test_a_hit_in_memory_of_all_ranks_is_answered_at_once(windows: Ranks, boundary: int):
    """As by a query, unless the hit ends before the last boundary: a slower tier may have more."""
    tokens = list(range(10 * CHUNK))
    windows.hold(tokens)
    windows.hold_boundary(tokens, boundary)
    windows.client.set_memories(in_memory(*windows.engines))

    found = windows.client.peek(RequestKeys("r", tokens, len(tokens)), len(tokens))

    if boundary == 5 * CHUNK:
        assert found is None
    else:
        assert found[1].answer == replace(windows.ask(tokens), pinned=False, costs=((10, 0.0),))
        assert found[1].answer.resident


@pytest.mark.parametrize("lacks", ["first", "last", "all"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_that_a_rank_lacks_in_memory_is_queried(ranks: Ranks, rank: int, lacks: str):
    tokens = list(range(4 * CHUNK))
    ranks.hold(tokens, ranks=[1 - rank])
    if lacks == "last":
        ranks.hold(tokens[:-CHUNK], ranks=[rank])
    elif lacks == "first":
        ranks.hold(tokens, ranks=[rank])
        hasher = ChunkHasher(RequestNamespace().root(ranks.roots[rank]), chunk_size=CHUNK)
        ranks.engines[rank].keys.difference_update(hasher.extend_keys(tokens[:CHUNK]))
    memories = in_memory(*ranks.engines)
    keys = RequestKeys("r", tokens, len(tokens))
    ranks.client.set_memories([*memories[:rank], lambda: None, *memories[rank + 1 :]])
    assert ranks.client.peek(keys, len(tokens)) is None  # what the rank has is not known
    assert not keys.num_hashed
    ranks.client.set_memories(memories)

    assert ranks.client.peek(keys, len(tokens)) is None

    assert keys.num_hashed == (len(tokens) if lacks == "last" else CHUNK)
    lookup = ranks.client.ask(keys, len(tokens))
    assert ranks.wait(lookup).chunks == (3 if lacks == "last" else 0)


def test_a_request_whose_query_finds_no_connection_can_be_hashed_later(ranks: Ranks, until):
    """The connection is lost between the lookup in memory and the query."""
    tokens = list(range(4 * CHUNK))
    keys = RequestKeys("r", tokens, len(tokens))
    ranks.client.set_memories(in_memory(*ranks.engines))
    assert ranks.client.peek(keys, len(tokens)) is None
    ranks.client._connected = False
    ranks.client.ask(keys, len(tokens))
    ranks.client._connected = True

    assert keys.requested < len(tokens)  # so that the plan of the stores requests them
    ranks.client.hash(keys, len(tokens))

    until(lambda: keys.num_hashed == len(tokens))


@pytest.mark.parametrize(
    ("groups", "partial_chunks", "answer", "kept"),
    [
        (GROUPS, True, Answer(4, boundary=4 * CHUNK - BLOCK), True),  # one token is left to compute
        (GROUPS, True, Answer(4, boundary=3 * CHUNK), False),
        (GROUPS, False, Answer(4, boundary=3 * CHUNK), True),  # no boundary is stored inside of a chunk
        (GROUPS, False, Answer(4, boundary=2 * CHUNK), False),
        (ONE_GROUP, True, Answer(4), True),
        (ONE_GROUP, True, Answer(3), False),
    ],
)
def test_a_promise_of_a_whole_prompt_is_kept_by_the_last_position_where_it_can_continue(
    groups, partial_chunks, answer, kept
):
    promise = Promise("p", 4 * CHUNK, "0" * 32, "0" * 32, 1.0)
    lookup = Lookup("r#1", 4 * CHUNK, 0, 0.0, promise, 1.0)

    query = Query([], groups, partial_chunks=partial_chunks)
    assert query.keeps(promise, lookup, answer, CHUNK) == kept


async def test_lookups_of_a_rank_that_does_not_read_are_misses_before_memory_grows_without_bound(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookup_module, "MAX_BUFFERED_BYTES", 1 << 16)
    ended = asyncio.Event()

    async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    path = socket_dir / "rank.sock"
    async with await asyncio.start_unix_server(read_nothing, path):
        rank = RankConnection(0, path, lambda: None)
        _, rank._writer = await asyncio.open_unix_connection(path)
        rank.identity = object()  # type: ignore[assignment]
        asked = [
            asyncio.ensure_future(rank.call({"op": "lookup", "keys": bytes(1 << 16)})) for _ in range(20)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)

        missed = [one for one in asked if one.done()]
        assert {one.result() for one in missed} == {None}
        assert rank._writer.transport.get_write_buffer_size() <= 3 << 16
        for one in asked:
            one.cancel()
        rank._writer.close()
        ended.set()


async def test_a_connection_that_is_cancelled_while_a_rank_of_another_protocol_answers_ends(socket_dir: Path):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(EOFError):
            message = await receive(reader)
            writer.write(encode({"id": message["id"], "protocol": PROTOCOL + 1}))
            await reader.read()

    path = socket_dir / "rank.sock"
    async with await asyncio.start_unix_server(answer, path):
        # Iterations of the loop before the cancellation; the answer arrives in one of them.
        for number in range(30):
            running = asyncio.ensure_future(RankConnection(0, path, lambda: None).run())
            await turns(number)
            running.cancel()
            await in_time(asyncio.wait({running}))
