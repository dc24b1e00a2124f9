"""Fixtures of real vLLM engines and of the reference engine without connector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo.documents import make_document
from examples.demo.model import DEMO, make_model
from examples.vllm.client import long_text
from tests.integration.model_families import LLAMA
from tests.integration.serving import COMMANDS, MODEL, Serving, serving
from tests.integration.vllm_driver import Engines, Reference

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("e2e"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def reference(engines: Engines) -> Reference:
    return Reference(engines.start())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the disk tier of the module's engines."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model with a tokenizer, for `vllm serve`."""
    directory = tmp_path_factory.mktemp("model") / "small"
    texts = [make_document(1).text, long_text("Manual of the harbour", 1), " ".join(map(str, range(999)))]
    make_model(directory, texts, size=replace(LLAMA, vocabulary=DEMO.vocabulary, max_tokens=DEMO.max_tokens))
    return directory


@pytest.fixture(scope="session")
def server(
    engines: Engines, served_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Run the quickstart's server, one for all tests: it takes half a minute to start."""
    del engines  # its start has filled vLLM's cache of models
    directory = tmp_path_factory.mktemp("serve")
    (directory / "template.jinja").write_text(TEMPLATE)
    more = [
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--chat-template=template.jinja",
        "--max-num-seqs=4",
    ]
    with serving(COMMANDS[1].replace(MODEL, str(served_model)), directory, *more) as server:
        yield server
