"""Each mutation of `make mutants` matches the source, and its tests exist."""

from __future__ import annotations

import pytest

from tools.mutants.__main__ import verdict
from tools.mutants.mutation import ROOT, Mutation, MutationError, mutated
from tools.mutants.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_source_exactly_once(mutation):
    source = (ROOT / mutation.path).read_text(encoding="utf-8")

    assert mutated(mutation, source) != source
    assert [test for test in mutation.tests if not is_there(test)] == []


def is_there(test: str) -> bool:
    """Whether the file, or the test or the class of tests in it, exists."""
    path, _, name = test.partition("::")
    file = ROOT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return bool(text) and (not name or f"def {name}(" in text or f"class {name}(" in text)


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("source", "new", "message"),
    [
        ("a = 1\n", "b", "0 times"),
        ("x = 1\nx = 1\n", "b", "2 times"),
        ("x = 1\n", "if", "would not be valid Python"),
    ],
)
def test_a_mutation_that_does_not_fit_says_what_to_do(source, new, message):
    with pytest.raises(MutationError, match=message):
        mutated(Mutation("a name", "a/path.py", "x = 1", new, ()), source)


@pytest.mark.parametrize(
    ("status", "output", "noticed"),
    [
        (0, "5 passed", False),
        (1, "FAILED tests/unit/test_a.py::test_b - AssertionError", True),
        (1, "ERROR tests/unit/test_a.py::test_b - assert 1 == 0", True),
        (1, "+++++ Timeout +++++\nTimeout (>60.0s) from pytest-timeout.", True),
        (2, "ERROR tests/unit/test_a.py - ImportError", False),
        (2, "ERROR tests/unit/test_a.py::test_b - ImportError", False),
        (4, "ERROR: file or directory not found: tests/unit/test_c.py", False),
        (5, "no tests ran", False),
    ],
)
def test_only_a_failing_test_counts_as_detection(status, output, noticed):
    assert verdict(status, output)[0] is noticed
