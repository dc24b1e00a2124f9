"""`lmcache-async warm`: between the tiers of a config, and by requests to a server."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import threading

import numpy as np
import pytest
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from lmcache_async.errors import TierUnavailableError
from lmcache_async.maintenance.concurrency import no_progress
from lmcache_async.maintenance.prompts import read_prompts
from lmcache_async.maintenance.server import warm_server
from lmcache_async.memory.header import read_header
from lmcache_async.types import Chunk
from tests.maintenance.filled import (
    TOKENS,
    damage,
    filled,
    invoke,
    key_file,
    loaded,
    record_files,
    rewrite,
    rig_of,
    told,
)
from tests.support.daemons import WAITS, ThreadedDaemon, socket_path

OTHER = [*TOKENS[:16], *range(7, 27)]
"""The second prompt of `root`: two of its chunks are those of TOKENS."""


@pytest.fixture
def config(root, tmp_path, valkey):
    """cpu, valkey with its own prefix, and the filled disk."""
    tiers = ["cpu", json.loads(valkey), {"name": "disk", "path": str(root), "max_bytes": "1GiB"}]
    return config_of(tmp_path, *tiers)


@pytest.fixture
def upper(valkey):
    """The tier of `config` to which records are copied."""
    return {"tiers": [json.loads(valkey)]}


def config_of(folder, *tiers, **keys):
    path = folder / "config.yaml"
    path.write_text(json.dumps({"tiers": tiers, **keys}))
    return path


def prompts_of(folder, *prompts, name="prompts.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def test_prefixes_of_prompts_are_copied_up_and_loaded_from_there(config, tmp_path, upper):
    prompts = prompts_of(tmp_path, [*TOKENS, 1, 2, 3], [5, 6, 7])

    done = told("warm", "--config", config, "--prompts", prompts)
    again = told("warm", "--config", config, "--prompts", prompts)

    assert (done["prompts"], done["tokens"], done["found_tokens"]) == (2, 46, 40)
    assert done["copied"] == {"tier 'valkey'": 5}
    assert (again["copied"], again["there"]) == ({}, {"tier 'valkey'": 5})
    assert loaded(rig_of(), None, **upper) == 40
    assert loaded(rig_of(), None, OTHER, **upper) == 16

    partial = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, OTHER))

    assert partial["found_tokens"] == 36
    assert loaded(rig_of(), None, OTHER, **upper) == 36


def test_a_trace_is_warmed_by_how_often_chunks_are_used(config, tmp_path, upper):
    rows = [{"timestamp": 0, "prompt_token_ids": TOKENS}] + 2 * [{"timestamp": 1, "prompt_token_ids": OTHER}]
    trace = prompts_of(tmp_path, *rows, name="trace.jsonl")

    done = told("warm", "--config", config, "--trace", trace, "--max-bytes", 5 * 4608, "--in-flight", 1)

    assert (done["copied"], done["skipped"]) == ({"tier 'valkey'": 5}, 3)
    assert loaded(rig_of(), None, OTHER, **upper) == 36
    assert loaded(rig_of(), None, TOKENS, **upper) == 16


def test_one_namespace_can_be_selected(config, root, tmp_path, upper):
    filled(root, rig=rig_of("model-b"))
    prompts = prompts_of(tmp_path, TOKENS)

    one = told("warm", "--config", config, "--prompts", prompts, "--namespace", "model=model-b")

    assert one["namespaces"] == 1
    assert loaded(rig_of("model-b"), None, **upper) == 40
    assert loaded(rig_of("model-a"), None, **upper) == 0
    assert told("warm", "--config", config, "--prompts", prompts)["namespaces"] == 2


def test_the_pool_of_a_host_is_warmed_from_a_valkey_server(root, tmp_path, valkey):
    with socket_path() as path, ThreadedDaemon(path):
        host = {"name": "host", "socket": str(path), "prefault": False, **WAITS}
        config = config_of(tmp_path, host, json.loads(valkey))
        told("copy", root, "valkey", "--config", config)

        done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS))

        assert done["copied"] == {"tier 'host'": 5}
        assert loaded(rig_of(), None, tiers=[host]) == 40


def test_a_damaged_record_and_one_with_other_tokens_are_not_copied(config, root, tmp_path, upper):
    _, path, wrong, *_ = record_files(root)
    damage(wrong)
    header = read_header(memoryview(path.read_bytes()))
    rewrite(path, header, header.namespace, Chunk(header.key, 8, header.tokens + 1))

    done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS), code=1)

    assert done["refused"] == {"tokens": 1, "checksum": 1}
    assert loaded(rig_of(), None, **upper) == 8
    assert told("verify", root, code=1)["wrong"] == {"checksum": 1}  # of the damaged one


def test_encrypted_records_are_found_with_their_keys_and_stay_encrypted(tmp_path, valkey):
    encryption = {"encryption.key_file": str(key_file(tmp_path))}
    filled(tmp_path / "cache", **encryption)
    tiers = [json.loads(valkey), {"name": "disk", "path": str(tmp_path / "cache"), "max_bytes": "1GiB"}]
    prompts = prompts_of(tmp_path, TOKENS)

    refused = invoke("warm", "--config", config_of(tmp_path, *tiers), "--prompts", prompts)
    done = told("warm", "--config", config_of(tmp_path, *tiers, **encryption), "--prompts", prompts)

    assert refused.exit_code == 2
    assert "need --config with their keys" in refused.stderr
    assert done["copied"] == {"tier 'valkey'": 5}
    assert told("inspect", "--tier", valkey)["namespaces"][0]["title"].startswith("encrypted")
    assert loaded(rig_of(), None, tiers=tiers[:1], **encryption) == 40


@pytest.mark.parametrize("name", ["{tmp_path}", "{tmp_path}/none", "./none/tokenizer.json"])
def test_a_tokenizer_that_is_not_at_its_path_is_not_looked_for_on_the_hub(config, tmp_path, name):
    prompts = prompts_of(tmp_path, {"prompt": "one two"})

    result = invoke(
        "warm", "--config", config, "--prompts", prompts, "--tokenizer", name.format(tmp_path=tmp_path)
    )

    assert result.exit_code == 2
    assert result.stderr.startswith("--tokenizer: there is no file ")
    assert result.stderr.endswith(("tokenizer.json\n", "/none\n"))


def test_text_is_tokenized_with_the_models_tokenizer(config, tmp_path):
    words = {f"w{token}": token for token in range(200)} | {"?": 200}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = prompts_of(tmp_path, {"prompt": " ".join(f"w{token}" for token in TOKENS)})

    without = invoke("warm", "--config", config, "--prompts", prompts)
    done = told("warm", "--config", config, "--prompts", prompts, "--tokenizer", tmp_path)
    prompts_of(tmp_path, {"prompt": "half a character: \ud800"})
    invalid = invoke("warm", "--config", config, "--prompts", prompts, "--tokenizer", tmp_path)

    assert without.exit_code == 2
    assert "--tokenizer" in without.stderr
    assert done["found_tokens"] == 40
    assert invalid.exit_code == 2
    assert r"cannot encode the prompt 'half a character: \ud800'" in invalid.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [1, 2]}\n', "hashes are not the keys of records"),
        ('{"block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}', "request 1: a trace of block hashes"),
        ("[1, 2]\n[1, -2]\n", "line 2: expected token ids"),
        ("[]\n", "expected token ids"),
        ("[1.5]\n", "expected token ids"),
        ("[true]\n", "expected token ids"),
        ("{}\n", "expected one of prompt_token_ids"),
        ("nonsense\n", "line 1: not JSON"),
        ("[1, 2]\n" + "[" * 100_000 + "\n", "line 2: not JSON"),
        ("\n", "has no prompts"),
    ],
)
def test_the_error_for_an_invalid_prompt_names_its_place(config, tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)

    refused = invoke("warm", "--config", config, "--trace", path)

    assert refused.exit_code == 2
    assert message in refused.stderr


def test_prompts_in_every_form(tmp_path):
    path = tmp_path / "prompts.jsonl.gz"
    rows = [[1, 2], {"prompt_token_ids": [3]}, {"prompt": [4]}, {"prompt": "five"}, "six", [1, 2]]
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))

    assert [
        (prompt if isinstance(prompt, str) else np.frombuffer(prompt, np.int32).tolist(), times)
        for prompt, times in read_prompts(path, by_use=False)
    ] == [([1, 2], 2), ([3], 1), ([4], 1), ("five", 1), ("six", 1)]

    inner = {"type": "subagent", "requests": [{"prompt": "b"}, {"prompt": "b"}]}
    (session := tmp_path / "session.json").write_text(
        json.dumps({"id": "x", "requests": [{"prompt": "a"}, inner]})
    )

    assert read_prompts(session, by_use=True) == [("b", 2), ("a", 1)]


ODD_ANSWERS = ("[]", '{"usage": [1]}', '{"usage": {"prompt_tokens": "9", "prompt_tokens_details": 3}}')
REFUSALS = {"too long": '{"message": "the prompt is too long"}', "nested": "[" * 100_000}


class Answers(http.server.BaseHTTPRequestHandler):
    """A server with the routes of vLLM: models, and completions with usage."""

    def do_GET(self):
        self._say(200, '{"data": [{"id": "the-model"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        prompt = body["prompt"]
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 2}}
        if prompt == "wait":
            self.server.waiting.set()
            self.server.go_on.wait(60)
        elif prompt in ODD_ANSWERS:
            self._say(200, prompt)
        elif isinstance(prompt, str) and prompt in REFUSALS:
            self._say(400, REFUSALS[prompt])
        else:
            self._say(200, json.dumps({"usage": usage}))

    def log_message(self, *_):
        pass

    def _say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def vllm():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked, server.waiting, server.go_on = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=[0.01])  # or shutdown takes 0.5 s
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_gets_one_request_per_prompt_for_one_token(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    prompts = prompts_of(tmp_path, [1, 2, 3], "text", "too long", "nested", "\ud800")

    done = told("warm", "--url", vllm.url, "--prompts", prompts, "--in-flight", 1, code=1)

    assert (done["model"], done["prompts"], done["tokens"], done["cached_tokens"]) == ("the-model", 3, 8, 6)
    assert done["refused"] == 2
    assert "the prompt is too long" in done["first_refusal"]
    assert [asked[0] for asked in vllm.asked] == 5 * ["/v1/completions"]
    assert vllm.asked[4][2]["prompt"] == "\ud800"
    assert vllm.asked[0][1:] == (
        "Bearer key",
        {"model": "the-model", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0},
    )
    for key in ("schl\u00fcssel", "two\nlines"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        refused = invoke("warm", "--url", vllm.url, "--prompts", prompts)
        assert refused.exit_code == 2
        assert "VLLM_API_KEY contains characters that a key cannot have" in refused.stderr


def test_an_answer_without_a_usage_counts_no_tokens(vllm, tmp_path):
    done = told("warm", "--url", vllm.url, "--prompts", prompts_of(tmp_path, *ODD_ANSWERS))

    assert (done["prompts"], done["tokens"], done["cached_tokens"]) == (3, 0, None)


def test_a_cancelled_request_is_not_awaited(vllm):
    async def do():
        asking = asyncio.create_task(
            warm_server(vllm.url, ["wait"], no_progress, model="m", in_flight=2, timeout_s=600)
        )
        await asyncio.to_thread(vllm.waiting.wait, 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    uvloop.run(asyncio.wait_for(do(), 60))


async def test_a_late_answer_is_an_error(vllm):
    with pytest.raises(TierUnavailableError):
        await warm_server(vllm.url, ["wait"], no_progress, model="m", in_flight=1, timeout_s=0.2)
