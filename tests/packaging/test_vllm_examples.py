"""The examples with vLLM, against servers that report cached tokens and servers that do not."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from examples.vllm import chat, openai_client, rag


@contextmanager
def server(details: dict[str, Any] | None) -> Iterator[str]:
    """An OpenAI API that returns one token for every request, with these details of the prompt's tokens."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self._send("application/json", json.dumps({"object": "list", "data": [MODEL]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            usage = {"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901}
            choice = {"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": "stop"}
            events = [
                {**EVENT, "choices": [choice]},
                {**EVENT, "choices": [], "usage": {**usage, "prompt_tokens_details": details}},
            ]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            self._send("text/event-stream", f"{text}data: [DONE]\n\n")

        def _send(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=[0.01])  # or shutdown takes 0.5 s
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/v1"
        finally:
            httpd.shutdown()
            thread.join()


MODEL = {"id": "tiny", "object": "model", "created": 0, "owned_by": "us"}
EVENT = {"id": "1", "object": "text_completion", "created": 0, "model": "tiny"}


@pytest.mark.parametrize("example", [openai_client, chat, rag], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    ("details", "told"),
    [
        (None, "  900 tokens, cached tokens not reported by the server, first token"),
        ({"cached_tokens": None}, "  900 tokens, cached tokens not reported by the server, first token"),
        ({"cached_tokens": 0}, "    0 of   900 tokens from a cache, first token"),
        ({"cached_tokens": 512}, "  512 of   900 tokens from a cache, first token"),
    ],
)
def test_the_report_of_a_server_is_printed(monkeypatch, capsys, example, details, told):
    with server(details) as url:
        monkeypatch.setattr(sys, "argv", ["example", "--url", url])
        example.main()
    answers = [line for line in capsys.readouterr().out.splitlines() if "first token" in line]

    assert len(answers) >= 2
    assert all(told in line for line in answers)


@pytest.mark.parametrize(
    ("cached", "told"), [(None, "cached tokens not reported, "), (16, "   16 of     4 tokens from a cache, ")]
)
def test_the_report_of_vllm_as_a_library_is_printed(monkeypatch, capsys, cached, told):
    class FakeLLM:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def generate(self, *arguments: Any, **options: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(num_cached_tokens=cached, prompt_token_ids=[1, 2, 3, 4])]

        def reset_prefix_cache(self) -> bool:
            return True

    # Importing vLLM takes half a minute; tests/integration runs the example with it.
    vllm, config = ModuleType("vllm"), ModuleType("vllm.config")
    vllm.LLM, vllm.SamplingParams, config.KVTransferConfig = FakeLLM, dict, dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(sys, "argv", ["example"])
    runpy.run_module("examples.vllm.offline_vllm", run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(told in line for line in lines)
