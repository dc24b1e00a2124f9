"""`lmcache-async warm`: between the tiers of a config, and by requests to a server."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import secrets
import threading
import uuid

import pytest
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from lmcache_async.errors import TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.prompts import Prompt, read_prompts
from lmcache_async.maintenance.server import warm_server
from lmcache_async.maintenance.warmup import key_chain
from lmcache_async.memory.header import read_header
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.types import Chunk
from tests.maintenance.filled import TOKENS, damage, filled, invoke, loaded, record_files, rig_of, told
from tests.support.daemons import WAITS, ThreadedDaemon, socket_path
from tests.support.valkey_servers import running

OTHER = [*TOKENS[:16], *range(7, 27)]
"""The second prompt of `root`: two chunks are those of TOKENS."""


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


@pytest.fixture
def config(root, tmp_path, server):
    """cpu, valkey with a prefix of its own, and the filled disk."""
    path = tmp_path / "config.yaml"
    tiers = ["cpu", valkey(server), {"name": "disk", "path": str(root), "max_bytes": "1GiB"}]
    path.write_text(json.dumps({"tiers": tiers}))
    return path


def valkey(server):
    return {"name": "valkey", "url": server.url, "key_prefix": uuid.uuid4().hex, **WAITS}


def upper(config):
    return [json.loads(config.read_text())["tiers"][1]]


def prompts_of(folder, *prompts, name="prompts.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def test_prefixes_of_prompts_are_copied_up_and_loaded_from_there(config, tmp_path):
    prompts = prompts_of(tmp_path, [*TOKENS, 1, 2, 3], [5, 6, 7])

    done = told("warm", "--config", config, "--prompts", prompts)
    again = told("warm", "--config", config, "--prompts", prompts)

    assert (done["prompts"], done["tokens"], done["found_tokens"]) == (2, 46, 40)
    assert done["copied"] == {"tier 'valkey'": 5}
    assert (again["copied"], again["there"]) == ({}, {"tier 'valkey'": 5})
    assert loaded(rig_of(), None, tiers=upper(config)) == 40
    assert loaded(rig_of(), None, OTHER, tiers=upper(config)) == 16


def test_a_partial_chunk_is_copied(config, tmp_path):
    done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, OTHER))

    assert done["found_tokens"] == 36
    assert loaded(rig_of(), None, OTHER, tiers=upper(config)) == 36


def test_a_trace_is_warmed_by_how_often_chunks_are_used(config, tmp_path):
    rows = [{"timestamp": 0, "prompt_token_ids": TOKENS}] + 2 * [{"timestamp": 1, "prompt_token_ids": OTHER}]
    trace = prompts_of(tmp_path, *rows, name="trace.jsonl")

    done = told("warm", "--config", config, "--trace", trace, "--max-bytes", 5 * 4608, "--in-flight", 1)

    assert (done["copied"], done["skipped"]) == ({"tier 'valkey'": 5}, 3)
    assert loaded(rig_of(), None, OTHER, tiers=upper(config)) == 36
    assert loaded(rig_of(), None, TOKENS, tiers=upper(config)) == 16


def test_one_namespace(config, root, tmp_path):
    filled(root, rig=rig_of("model-b"))
    prompts = prompts_of(tmp_path, TOKENS)

    one = told("warm", "--config", config, "--prompts", prompts, "--namespace", "model=model-b")

    assert one["namespaces"] == 1
    assert loaded(rig_of("model-b"), None, tiers=upper(config)) == 40
    assert loaded(rig_of("model-a"), None, tiers=upper(config)) == 0
    assert told("warm", "--config", config, "--prompts", prompts)["namespaces"] == 2


def test_the_pool_of_a_host_is_warmed_from_a_valkey_server(root, tmp_path, server):
    with socket_path() as path, ThreadedDaemon(path):
        host = {"name": "host", "socket": str(path), "prefault": False}
        tiers = [host, valkey(server)]
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"tiers": tiers}))
        told("copy", root, "valkey", "--config", config)

        done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS))

        assert done["copied"] == {"tier 'host'": 5}
        assert loaded(rig_of(), None, tiers=[host]) == 40


def test_a_wrong_record_is_not_copied(config, root, tmp_path):
    damage(record_files(root)[1])

    done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS), code=1)

    assert done["refused"] == {"checksum": 1}
    assert loaded(rig_of(), None, tiers=upper(config)) == 8


def test_an_intact_record_with_other_tokens_is_not_copied(config, root, tmp_path):
    path = record_files(root)[1]
    data = bytearray(path.read_bytes())
    header = read_header(memoryview(data))
    made = RecordFormat(namespace=header.namespace, layout=header.layout, dtype=header.dtype, chunk_size=8)
    seal(
        memoryview(data),
        format=made,
        chunk=Chunk(header.key, 8, header.tokens + 1),
        request_namespace="",
        shape=header.shape,
        payload_bytes=header.payload_bytes,
    )
    path.write_bytes(data)

    done = told("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS), code=1)

    assert done["refused"] == {"tokens": 1}
    assert loaded(rig_of(), None, tiers=upper(config)) == 8
    assert told("verify", root)["records"] == 8  # its checksums are right


def test_encrypted_records_are_found_with_their_keys_and_stay_encrypted(tmp_path, server):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(secrets.token_hex(32))
    encryption = {"encryption": {"key_file": str(keys)}}
    filled(tmp_path / "cache", **{"encryption.key_file": str(keys)})
    tiers = [valkey(server), {"name": "disk", "path": str(tmp_path / "cache"), "max_bytes": "1GiB"}]
    config, prompts = tmp_path / "config.yaml", prompts_of(tmp_path, TOKENS)

    config.write_text(json.dumps({"tiers": tiers}))
    refused = invoke("warm", "--config", config, "--prompts", prompts)
    config.write_text(json.dumps({"tiers": tiers} | encryption))
    done = told("warm", "--config", config, "--prompts", prompts)

    assert refused.exit_code == 2
    assert "need --config with their keys" in refused.stderr
    assert done["copied"] == {"tier 'valkey'": 5}
    assert told("inspect", "--tier", json.dumps(tiers[0]))["namespaces"][0]["title"].startswith("encrypted")
    assert loaded(rig_of(), None, tiers=tiers[:1], **{"encryption.key_file": str(keys)}) == 40


def test_text_is_tokenized_with_the_models_tokenizer(config, tmp_path):
    words = {f"w{token}": token for token in range(200)} | {"?": 200}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = prompts_of(tmp_path, {"prompt": " ".join(f"w{token}" for token in TOKENS)})

    without = invoke("warm", "--config", config, "--prompts", prompts)
    done = told("warm", "--config", config, "--prompts", prompts, "--tokenizer", tmp_path)

    assert without.exit_code == 2
    assert "--tokenizer" in without.stderr
    assert done["found_tokens"] == 40


@pytest.mark.parametrize(
    ("tiers", "options", "message"),
    [
        (["cpu"], [], "there are no two tiers to copy between; reachable outside of the engine: none"),
        (["cpu", {"name": "disk", "path": "/x", "max_bytes": 1}], [], "no two tiers to copy between"),
        (["cpu"], ["--to", "cpu"], "tier cpu cannot be reached outside"),
    ],
)
def test_an_error_says_why_nothing_can_be_warmed(tmp_path, tiers, options, message):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"tiers": tiers}))

    refused = invoke("warm", "--config", config, "--prompts", prompts_of(tmp_path, TOKENS), *options)

    assert refused.exit_code == 2
    assert message in refused.stderr


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


@pytest.mark.parametrize("change", [lambda data: data[:-9], lambda data: data[:40] + bytes(40) + data[80:]])
def test_the_error_for_a_damaged_compressed_file_names_it(config, tmp_path, change):
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(change(gzip.compress(json.dumps(list(range(1000))).encode())))

    refused = invoke("warm", "--config", config, "--prompts", path)

    assert refused.exit_code == 2
    assert f"cannot read {path}" in refused.stderr


def test_prompts_in_every_form(tmp_path):
    path = tmp_path / "prompts.jsonl.gz"
    rows = [[1, 2], {"prompt_token_ids": [3]}, {"prompt": [4]}, {"prompt": "five"}, "six", [1, 2]]
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))

    found = read_prompts(path, by_use=False)

    assert [prompt.text or prompt.tokens.tolist() for prompt in found] == [[1, 2], [3], [4], "five", "six"]
    assert [prompt.times for prompt in found] == [2, 1, 1, 1, 1]


def test_nested_requests_of_a_session_are_read(tmp_path):
    path = tmp_path / "session.json"
    inner = {"type": "subagent", "requests": [{"prompt": "b"}, {"prompt": "b"}]}
    path.write_text(json.dumps({"id": "x", "requests": [{"prompt": "a"}, inner]}))

    assert [(prompt.text, prompt.times) for prompt in read_prompts(path, by_use=True)] == [("b", 2), ("a", 1)]


class Answers(http.server.BaseHTTPRequestHandler):
    """Says what vLLM says: models, and completions with their usage."""

    def do_GET(self):
        self._say(200, {"data": [{"id": "the-model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if body["prompt"] == "wait":
            self.server.waiting.set()
            self.server.go_on.wait(60)
            return
        if body["prompt"] == "nested":
            self._send(400, b"[" * 100_000)
            return
        if body["prompt"] == "too long":
            self._say(400, {"message": "the prompt is too long"})
            return
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 2}}
        self._say(200, {"usage": usage})

    def log_message(self, *_):
        pass

    def _say(self, status, answer):
        self._send(status, json.dumps(answer).encode())

    def _send(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def vllm():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked, server.waiting, server.go_on = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=[0.01])  # or its end takes half a second
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_gets_one_request_per_prompt_for_one_token(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    prompts = prompts_of(tmp_path, [1, 2, 3], "text", "too long")

    done = told("warm", "--url", vllm.url, "--prompts", prompts, "--in-flight", 1, code=1)

    assert (done["model"], done["prompts"], done["tokens"], done["cached_tokens"]) == ("the-model", 2, 7, 4)
    assert done["refused"] == 1
    assert "the prompt is too long" in done["first_refusal"]
    assert [asked[0] for asked in vllm.asked] == 3 * ["/v1/completions"]
    assert vllm.asked[0][1:] == (
        "Bearer key",
        {"model": "the-model", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0},
    )


def test_an_invalid_key_of_the_server_is_refused(vllm, tmp_path, monkeypatch):
    for key in ("schl\u00fcssel", "two\nlines"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        refused = invoke("warm", "--url", vllm.url, "--prompts", prompts_of(tmp_path, [1]))

        assert refused.exit_code == 2
        assert "VLLM_API_KEY contains characters that a key cannot have" in refused.stderr


def test_a_text_without_a_utf_8_form_is_sent(vllm, tmp_path):
    (file := tmp_path / "prompts.jsonl").write_text('"\\ud800"\n')

    assert told("warm", "--url", vllm.url, "--prompts", file)["prompts"] == 1
    assert vllm.asked[0][2]["prompt"] == "\ud800"


def test_a_deeply_nested_answer_is_not_decoded(vllm, tmp_path):
    prompts = prompts_of(tmp_path, "nested")

    assert told("warm", "--url", vllm.url, "--prompts", prompts, code=1)["refused"] == 1


def test_an_unreachable_server_ends_with_2(tmp_path):
    prompts = prompts_of(tmp_path, [1])

    assert invoke("warm", "--url", "http://127.0.0.1:9", "--prompts", prompts).exit_code == 2


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://localhost:abc", "http://[::1", "http://a b", "http://h:99999"]
)
def test_the_error_for_an_invalid_address_names_it(tmp_path, url):
    refused = invoke("warm", "--url", url, "--prompts", prompts_of(tmp_path, [1]))

    assert refused.exit_code == 2
    assert f"--url {url}: expected the address" in refused.stderr


@pytest.mark.parametrize("url", ["http://a..b", "http://127.0.0.1:9/\u00e9"])
def test_an_unusable_address_ends_with_2(tmp_path, url):
    assert invoke("warm", "--url", url, "--prompts", prompts_of(tmp_path, [1])).exit_code == 2


def test_a_cancelled_request_is_not_awaited(vllm):
    async def do():
        prompt = Prompt(None, "wait")
        asking = asyncio.create_task(
            warm_server(vllm.url, [prompt], Meter(), model="m", in_flight=2, timeout_s=600)
        )
        await asyncio.to_thread(vllm.waiting.wait, 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(do(), 60))


async def test_a_late_answer_is_an_error(vllm):
    with pytest.raises(TierUnavailableError):
        await warm_server(vllm.url, [Prompt(None, "wait")], Meter(), model="m", in_flight=1, timeout_s=0.2)


def test_exactly_one_file_is_required(config, tmp_path):
    file = prompts_of(tmp_path, [1])

    assert invoke("warm", "--config", config).exit_code == 2
    assert invoke("warm", "--config", config, "--prompts", file, "--trace", file).exit_code == 2
    assert invoke("warm", "--url", "http://x", "--config", config, "--prompts", file).exit_code == 2
    assert "give the engine's config file" in invoke("warm", "--prompts", file).stderr


@pytest.mark.parametrize("chunk_size", ["true", "0", "16777217", "8.0", '"8"'])
def test_an_invalid_chunk_size_has_no_keys(chunk_size):
    made = f'{{"algorithm":"xxh3_128","chunk_size":{chunk_size}}}'

    assert key_chain(made, b"") is None
    assert key_chain(made.replace(chunk_size, "8"), b"") is not None
