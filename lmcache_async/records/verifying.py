"""Every record read and proven; what is wrong is told, and removed or put aside where that is wanted."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.records.flight import Meter, RateLimit, each, in_order
from lmcache_async.records.namespaces import EVERYTHING, Selection
from lmcache_async.records.proving import Checked, KeyProof, check
from lmcache_async.records.state import StateFile
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept

MAX_TOLD = 100
_SAVE_EVERY = 256  # records; what is read twice after a kill is at most so many


class Remedy(Enum):
    """What becomes of a record that is wrong."""

    KEEP = "keep"
    REMOVE = "remove"
    QUARANTINE = "quarantine"


@dataclass(slots=True)
class Verification:
    """What a reading of all records came to.

    Attributes:
        records: Records read and found right.
        bytes: Bytes of all that were read.
        wrong: Records proven wrong, by cause.
        told: Of these the first, each with its cause in a sentence.
        errors: Records that could not be read; they may be right.
        gone: Records that were evicted or removed meanwhile.
        passed_over: Records of namespaces that were not meant.
        keys: Records found right, by how far their key was proven; see `KeyProof.of`.
        remedied: Records removed or put aside.
        resumed: Records of an earlier run that are counted in.
    """

    target: str
    holder: str = ""
    records: int = 0
    bytes: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    told: list[dict[str, str]] = field(default_factory=list)
    errors: int = 0
    gone: int = 0
    passed_over: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    remedied: int = 0
    resumed: int = 0
    complete: bool = False

    @property
    def right(self) -> bool:
        return not self.wrong and not self.errors

    def add(self, kept: Kept, checked: Checked | TierError | None) -> None:
        if checked is None:
            self.gone += 1
        elif isinstance(checked, TierError):
            self.errors += 1
            self._tell(kept, "error", str(checked))
        elif not checked.taken:
            self.passed_over += 1
        elif checked.cause:
            self.wrong[checked.cause] += 1
            self._tell(kept, checked.cause, checked.message)
        else:
            self.records += 1
            self.keys[checked.key_proof] += 1

    def _tell(self, kept: Kept, cause: str, message: str) -> None:
        if len(self.told) < MAX_TOLD:
            self.told.append({"key": kept.key.hex(), "cause": cause, "message": message})

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "held_by_process": self.holder or None,
            "complete": self.complete,
            **self.counts(),
            "resumed": self.resumed,
        }

    def counts(self) -> dict[str, Any]:
        """What a state file keeps of it."""
        return {
            "records": self.records,
            "bytes": self.bytes,
            "wrong": dict(sorted(self.wrong.items())),
            "wrong_records": list(self.told),
            "errors": self.errors,
            "gone": self.gone,
            "passed_over": self.passed_over,
            "keys": dict(sorted(self.keys.items())),
            "remedied": self.remedied,
        }

    def restore(self, counts: Mapping[str, Any]) -> None:
        self.records, self.bytes = counts["records"], counts["bytes"]
        self.wrong, self.keys = Counter({**counts["wrong"]}), Counter({**counts["keys"]})
        self.told, self.errors = list(counts["wrong_records"]), counts["errors"]
        self.gone, self.passed_over = counts["gone"], counts["passed_over"]
        self.remedied = counts["remedied"]
        self.resumed = self.records + self.wrong.total() + self.errors + self.gone + self.passed_over


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How to verify.

    Attributes:
        hash_key: The secret of a keyed hash, to prove keys with.
        cipher: Opens encrypted records; without it their outer checksum is all that is proven.
        state: Where to note how far it came; None notes nothing.
    """

    selection: Selection = EVERYTHING
    remedy: Remedy = Remedy.KEEP
    max_bytes_per_s: int | None = None
    hash_key: bytes = b""
    cipher: RecordCipher | None = None
    state: StateFile | None = None


async def verify(target: Target, options: VerifyOptions, meter: Meter) -> Verification:
    """Read and prove every record, in the order of their keys.

    Cancelled, it notes how far it came; a record is removed as a whole or not at all.

    Raises:
        ConfigError: The target cannot list what it has, or the state is of another run.
        TierUnavailableError: It does not answer.
    """
    report = Verification(target.name, target.holder)
    kept = sorted(await target.list())
    key_proof = KeyProof(kept, options.hash_key)
    after = _resume(options.state, report)
    left = [one for one in kept if one.key > after]
    meter.begin("records", records=len(left), nbytes=sum(one.nbytes for one in left) or None)
    look = functools.partial(check, selection=options.selection, key_proof=key_proof, cipher=options.cipher)
    rate = RateLimit(options.max_bytes_per_s)

    async def work(one: Kept) -> tuple[Kept, Checked | TierError | None]:
        try:
            checked = await target.examine(one, functools.partial(look, one))
            if checked is not None and checked.cause:
                # Between two pieces an engine may have evicted it and stored it anew: what is wrong is so twice.
                checked = await target.examine(one, functools.partial(look, one))
        except TierUnavailableError:
            raise
        except TierError as error:
            return one, error
        return one, checked

    last: Kept | None = None
    done = 0
    try:
        async with contextlib.aclosing(in_order(each(left), work, in_flight=target.in_flight)) as results:
            async for one, checked in results:
                await _settle(target, options.remedy, one, checked, report)
                last, done = one, done + 1
                nbytes = _bytes_read(one, checked)
                report.bytes += nbytes
                meter.advance(1, nbytes)
                if options.state is not None and done % _SAVE_EVERY == 0:
                    _note(options.state, last, report)
                await rate.wait(nbytes)
        report.complete = True
    finally:
        if options.remedy is not Remedy.KEEP and report.remedied:
            await target.sync()
        if options.state is not None and not report.complete and last is not None:
            _note(options.state, last, report)
    if options.state is not None:
        options.state.remove()
    return report


async def _settle(
    target: Target, remedy: Remedy, kept: Kept, checked: Checked | TierError | None, report: Verification
) -> None:
    report.add(kept, checked)
    if not isinstance(checked, Checked) or not checked.cause or remedy is Remedy.KEEP:
        return
    if remedy is Remedy.REMOVE:
        await target.remove([kept.key])
    else:
        await target.set_aside(kept.key, checked.cause)
    report.remedied += 1


def _bytes_read(kept: Kept, checked: Checked | TierError | None) -> int:
    if not isinstance(checked, Checked) or not checked.taken or checked.looked is None:
        return 0
    return checked.looked.record_bytes or kept.nbytes


def _resume(state: StateFile | None, report: Verification) -> bytes:
    """The key after which to go on."""
    found = state.load() if state is not None else {}
    if state is None or not found:
        return b""
    try:
        report.restore(found)
        return bytes.fromhex(found["after"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise state.wrong(error) from None


def _note(state: StateFile, last: Kept, report: Verification) -> None:
    state.save({"after": last.key.hex(), **report.counts()})


def about(target: str, selection: Selection, remedy: Remedy) -> Mapping[str, Any]:
    """What tells one verification from another, for its state file."""
    patterns: Sequence[str] = sorted(selection.patterns)
    return {"verify": target, "namespaces": list(patterns), "remedy": remedy.value}
