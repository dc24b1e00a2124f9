"""The demo: vLLM with and without the cache side by side, then with the cache after a restart.

    make demo            (or: python -m examples.demo.run --help)

Writes build/demo.json. Exits with 1 if an answer differs from that of vLLM without a connector, or a hit is missing.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.demo import connectors, documents, report
from examples.demo.cases import Cases
from examples.demo.client import Engine, EngineError
from examples.demo.machine import Machine
from examples.demo.rounds import Prompt, Tell, compare, compare_restarted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WARM_UP_ASKS = 6  # of 33 blocks each, to use each of machine.KV_BLOCKS
# Documents for the warm-up before and after the restart.
WARM_UP_SEEDS = (2_000_000, 2_000_001)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="a model's name or folder; without it a small one is made"
    )
    parser.add_argument("--connector", choices=connectors.NAMES, default=connectors.OURS)
    parser.add_argument(
        "--rounds", type=int, default=5, help="documents, each measured once; medians are shown"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a document")
    parser.add_argument(
        "--arena", default="", help="host memory of the cache; by default what suits the machine"
    )
    parser.add_argument("--disk", default="", help="size of the disk tier; likewise")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/demo"), help="model, disk tier and logs"
    )
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))
    return parser.parse_args(arguments)


class Demo:
    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.machine = Machine.detect()
        self.disk = options.directory / "disk"
        self.cases = Cases()

    def run(self) -> bool:
        """Measure, print the table and write the JSON file.

        Returns:
            Whether every answer was correct and every expected hit occurred.
        """
        start = time.monotonic()
        shutil.rmtree(self.disk, ignore_errors=True)
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        with bar as progress:
            task = progress.add_task("", total=5 + 2 * self.options.rounds)

            def step(text: str) -> None:
                progress.update(task, description=text)
                if not self.console.is_terminal:
                    self.console.print(text)

            def tell(text: str) -> None:
                progress.advance(task)
                self.console.print("  " + text)

            page_cache_left = self._measure(step, tell)
        result = report.summarise(
            self.cases,
            document_tokens=self.options.tokens,
            expect_hits=self.options.connector != "none",
            facts={
                "connector": self.options.connector,
                "model": self.options.model or "small Llama made by the demo",
                "machine": self.machine.describe(),
                "seconds": round(time.monotonic() - start, 1),
                "page_cache_left_bytes": page_cache_left,
            },
        )
        report.show(result, self.console)
        report.write(result, self.options.output)
        self.console.print(
            f"Written to {self.options.output}; the engines' logs are in {self.options.directory}."
        )
        return bool(result["ok"])

    def _measure(self, step: Tell, tell: Tell) -> int:
        step("making the model")
        model = self._model()
        step("tokenising the documents")
        rounds = self._prompts(model, range(self.options.rounds))
        before, after = (prompt for prompt, *_ in self._prompts(model, WARM_UP_SEEDS))
        tell(
            f"{len(rounds)} documents of {self.options.tokens} tokens, {len(rounds[0])} questions about each"
        )

        step("starting vLLM without a connector, and vLLM with one")
        with self._engine("plain", model, connector="none") as plain:
            with self._engine("cached", model, connector=self.options.connector) as cached:
                for engine in (plain, cached):
                    engine.wait_ready()
                    tell(f"vLLM is up: {engine.name}")
                step("warming the kernels up with another document")
                for engine in (plain, cached):
                    _warm_up(engine, before)
                step("new documents, then the same again from host memory")
                compare(plain, cached, rounds, self.cases, tell)
                step("ending the vLLM process that has the cache")
                cached.settle(2.0)
            step("starting it again")
            with self._engine("restarted", model, connector=self.options.connector) as restarted:
                restarted.wait_ready()
                tell("vLLM is up: restarted")
                _warm_up(restarted, after)
                step("the first documents again, now from disk")
                return compare_restarted(plain, restarted, rounds, self.disk, self.cases, tell)

    def _model(self) -> str:
        if self.options.model:
            return str(self.options.model)
        from examples.demo.model import make_model  # imports torch, which --help does not need

        directory: Path = self.options.directory / "model"
        make_model(directory, documents.training_texts())
        return str(directory)

    def _prompts(self, model: str, seeds: Sequence[int]) -> list[list[Prompt]]:
        """Return, for each seed, a document of exactly `--tokens` tokens followed by each of its questions."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        rounds = []
        for seed in seeds:
            document = documents.make_document(seed)
            text = tokenizer(document.text)["input_ids"][: self.options.tokens]
            if len(text) < self.options.tokens:
                raise SystemExit(f"a document has only {len(text)} tokens; lower --tokens")
            questions = (tokenizer(q, add_special_tokens=False)["input_ids"] for q in document.questions)
            rounds.append([text + question for question in questions])
        return rounds

    def _engine(self, name: str, model: str, *, connector: str) -> Engine:
        arena, disk = self.machine.cache_sizes
        options: Mapping[str, Any] = {
            "model": model,
            "max_model_len": self.options.tokens + 512,
            "max_num_batched_tokens": self.options.tokens
            + 512,  # a prompt is one step, so that only the cache differs
            "max_num_seqs": 4,
            "kv_transfer_config": connectors.transfer_config(
                connector, self.disk, arena=self.options.arena or arena, disk=self.options.disk or disk
            ),
            **self.machine.engine_options(own_model=not self.options.model),
        }
        return Engine(name, options, self.machine.environment, self.options.directory / f"{name}.log")


def _warm_up(engine: Engine, prompt: Prompt) -> None:
    """Compile what vLLM compiles on first use, and use every block of its pool once."""
    for _ in range(WARM_UP_ASKS):
        engine.ask(prompt)
        engine.settle(0.5)
        engine.reset()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the engines are closed
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        return 0 if Demo(options, console).run() else 1
    except EngineError as error:
        console.print(str(error), style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
