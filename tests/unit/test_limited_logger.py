"""Rate limits of log lines, and the log lines of a store and a retrieve."""

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.logging import LimitedLogger, NamedHandler
from lmcache_async.metrics.instrument import LogInstrument
from lmcache_async.types import RetrieveReport, StoreReport


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def texts(self):
        return [record.getMessage() for record in self.records]


def logger_to(handler):
    """A logger of this test, without the handlers and levels of other tests."""
    logger = logging.Logger("test", logging.INFO)  # noqa: LOG001
    logger.addHandler(handler)
    return logger


class Limited:
    """A limited logger with a clock set by the test."""

    def __init__(self, interval_s=30.0):
        self.now = 0.0
        self.lines = Lines()
        self.limited = LimitedLogger(logger_to(self.lines), interval_s=interval_s, clock=lambda: self.now)

    def report(self, *arguments):
        self.limited.report(*arguments)


def test_a_line_is_its_callers():
    log = Limited()
    log.limited.report("a", "tier %r: %d", "t", 5)
    for _ in range(2):
        try:
            int("odd")
        except ValueError:
            log.limited.exception("%d calls failed", 2)

    assert log.lines.texts == [
        "tier 't': 5",
        "2 calls failed: ValueError: invalid literal for int() with base 10: 'odd'",
    ]
    first, second = log.lines.records
    assert (first.levelno, second.levelno, second.exc_info[0]) == (logging.WARNING, logging.ERROR, ValueError)
    assert [(record.filename, record.funcName) for record in log.lines.records] == [
        ("test_limited_logger.py", "test_a_line_is_its_callers")
    ] * 2


def test_a_named_line_leaves_the_record_as_it_was():
    lines, own, target = Lines(), Lines(), logging.Logger("other", logging.INFO)  # noqa: LOG001
    target.addHandler(lines)
    logger = logger_to(NamedHandler(target))
    logger.addHandler(own)

    logger.info("tier %r: %d%%", "disk", 7)
    logger.warning("100%")

    assert lines.texts == ["lmcache-async: tier 'disk': 7%", "lmcache-async: 100%"]
    assert own.texts == ["tier 'disk': 7%", "100%"]


@pytest.mark.parametrize("times", [1, 3])
def test_causes_that_carry_data_do_not_grow_the_table_for_ever(times):
    log = Limited()
    for number in range(5000):
        for _ in range(times):
            log.report(f"cause {number}", "x")

    assert len(log.limited._causes) <= LimitedLogger._MAX_CAUSES


def test_many_other_causes_do_not_lift_the_rate_limit_of_a_frequent_one():
    log = Limited(interval_s=30)
    for number in range(3000):
        log.now = number / 1000
        log.report(f"cause {number}", "rare")
        log.report("busy", "busy")

    # If a full table were emptied as a whole, it would let one line through each time.
    assert sum(text.startswith("busy") for text in log.lines.texts) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 40)), max_size=40))
def test_no_line_is_lost_from_the_count_and_no_two_are_closer_than_the_interval(calls):
    log = Limited(interval_s=30)
    shown, told = {}, Counter()
    for cause, step in calls:
        log.now += step
        before = len(log.lines.texts)
        log.report(cause, f"{cause}.")
        for text in log.lines.texts[before:]:
            assert log.now - shown.get(cause, -1e9) >= 30
            shown[cause] = log.now
            told[cause] += 1 + (int(text.split("(")[1].split()[0]) if "(" in text else 0)

    for cause in "abc":
        _, held_back = log.limited._causes.get(cause, (None, 0))
        assert told[cause] + held_back == sum(called == cause for called, _ in calls)


STORED = StoreReport(
    stored=2,
    present=1,
    dropped=Counter(no_room=3),
    tokens=16,
    bytes=4_000_000,
    seconds=0.01,
    copy_seconds=0.004,
)
RETRIEVED = RetrieveReport(
    hit_chunks=2,
    hit_tokens=16,
    asked_tokens=24,
    bytes=4_000_000,
    seconds=0.004,
    by_tier=Counter(cpu=8, disk=8),
    cause="miss",
)


def instrument():
    lines = Lines()
    return LogInstrument(logger_to(lines)), lines


def test_a_store_is_one_line():
    hooks, lines = instrument()
    hooks.stored("r1", STORED)

    (text,) = lines.texts
    assert text == (
        "stored 16 tokens in 2 chunks (1 present, dropped: no_room=3), 4.0 MB:"
        " copied in 4.0 ms, 1.00 GB/s; with the tiers in 10.0 ms [r1]"
    )


def test_a_retrieve_is_one_line_that_names_the_tiers_and_the_cause():
    hooks, lines = instrument()
    hooks.retrieved("r1", RETRIEVED)

    assert lines.texts == [
        "retrieved 16/24 tokens (cpu=8, disk=8), 4.0 MB in 4.0 ms, 1.00 GB/s; ended by: miss [r1]"
    ]


@pytest.mark.parametrize("name", ["a\nERROR: b", "a\r\x1b[2Jb", "x" * 100_000])
def test_a_request_id_that_a_client_chose_adds_no_line_and_no_long_text(name):
    hooks, lines = instrument()
    hooks.stored(name, STORED)
    hooks.retrieved(name, RETRIEVED)

    assert all(text.isprintable() and len(text) < 500 for text in lines.texts)


def test_a_text_with_line_breaks_is_logged_in_one_line():
    lines = Lines()
    LimitedLogger(logger_to(lines)).report("cause", "request %s: %d of %s", "a\nb", 3, "é")

    assert lines.texts == [r"request a\nb: 3 of é"]


def test_empty_reports_can_be_logged():
    hooks, lines = instrument()
    hooks.stored("", StoreReport())
    hooks.retrieved("", RetrieveReport())

    assert "dropped: none" in lines.texts[0]
    assert lines.texts[1] == "retrieved 0/0 tokens (none), 0.0 MB in 0.0 ms, 0.00 GB/s []"
