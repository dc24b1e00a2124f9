"""The quickstart and the examples with vLLM, run as their pages describe, with one server for those that query one."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.serving import COMMANDS, DEADLINE_S, MODEL, ROOT, Serving
from tests.integration.vllm_driver import Engines

pytestmark = pytest.mark.vllm

LINE = re.compile(r"(\d+) of +(\d+) tokens from a cache")


def test_the_quickstart_has_three_commands_and_no_config_file() -> None:
    assert len(COMMANDS) == 3
    assert [command.split()[0] for command in COMMANDS] == ["pip", "vllm", "for"]
    assert "CONFIG" not in "".join(COMMANDS)
    assert "yaml" not in "".join(COMMANDS)


def test_the_quickstart_comes_to_a_hit(server: Serving, served_model: Path) -> None:
    command = (
        COMMANDS[2].replace(MODEL, str(served_model)).replace("localhost:8000", f"127.0.0.1:{server.port}")
    )

    def ask() -> str:
        ran = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=DEADLINE_S,
        )
        return ran.stdout

    start, before = len(server.log), server.loaded_tokens
    assert len(re.findall(r"^\d+\.\d+ s$", ask(), re.MULTILINE)) == 2
    deadline = time.monotonic() + DEADLINE_S
    while not (hit := re.search(r"retrieved (\d+)/\1 tokens \(cpu=\1\)", server.log[start:])):
        assert time.monotonic() < deadline, server.log[-4000:]
        ask()
    assert int(hit[1]) >= 1024
    assert re.search(r"stored \d+ tokens in \d+ chunks", server.log[start:])
    assert server.loaded_tokens - before >= 1024


def cached(server: Serving, module: str, complete: Callable[[list[int]], bool]) -> list[int]:
    """Return cached tokens by request, of a run on new texts.

    On a busy machine a store may end after the next question. The run is then repeated on other texts.
    """
    deadline = time.monotonic() + DEADLINE_S
    for seed in range(1, 100):
        command = [sys.executable, "-m", module, f"--url=http://127.0.0.1:{server.port}/v1", f"--seed={seed}"]
        ran = subprocess.run(
            command,
            env=server.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert ran.returncode == 0, ran.stderr
        found = [int(line[1]) for line in LINE.finditer(ran.stdout)]
        if complete(found) or time.monotonic() > deadline:
            break
    return found


def test_a_second_question_about_a_text_finds_it(server: Serving) -> None:
    first, second = cached(server, "examples.vllm.openai_client", lambda found: found[1] > 0)

    assert first == 0
    assert second >= 512


def test_each_round_of_a_chat_finds_the_rounds_before(server: Serving) -> None:
    rounds = cached(server, "examples.vllm.chat", lambda found: sorted(set(found)) == found)

    assert rounds[0] == 0
    assert sorted(set(rounds)) == rounds
    assert len(rounds) == 4


def test_documents_are_shared_as_far_as_prompts_begin_alike(server: Serving) -> None:
    def as_told(found: list[int]) -> bool:
        return found[1] > 0 and found[6] > found[5] > 0 and found[7] > found[5]

    found = cached(server, "examples.vllm.rag", as_told)

    assert [count > 0 for count in found] == [False, True, False, False, False, True, True, True]
    assert as_told(found)


def test_vllm_as_a_library_finds_the_first_prompt(engines: Engines, served_model: Path) -> None:
    printed = engines.run_module("examples.vllm.offline_vllm", f"--model={served_model}", "--enforce-eager")

    found = [int(line[1]) for line in LINE.finditer(printed)]
    assert found[0] == 0
    assert found[1] >= 512
