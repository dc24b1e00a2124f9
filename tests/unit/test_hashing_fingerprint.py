"""Fingerprints of weights: they depend on the content and not on the location."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest

from lmcache_async.hashing import processor_fingerprint, weights_fingerprint

MODES = ["sampled", "full"]
BIG = 40_000  # bytes, above the three samples of a tensor


def safetensors(tensors, *, metadata=None):
    """Write the format by hand: header length, JSON header, data."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, content in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def noise(seed, length):
    return random.Random(seed).randbytes(length)


@pytest.fixture
def tensors():
    return {"embed": noise(1, BIG), "bias": noise(2, 12), "empty": b"", "head": noise(3, BIG)}


@pytest.fixture
def model(tmp_path, tensors):
    """Two shards, an index and a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors(tensors))
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors({"last": noise(4, BIG)}))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_place_and_times_do_not_matter(model, tmp_path, mode):
    before = weights_fingerprint(model, mode=mode)
    elsewhere = tmp_path / "deep" / "other-name"
    shutil.copytree(model, elsewhere)
    for file in elsewhere.iterdir():
        os.utime(file, (1, 1))

    assert weights_fingerprint(elsewhere, mode=mode) == before
    assert before.startswith(f"{mode}:")
    assert len(before) == len(mode) + 1 + 32


@pytest.mark.parametrize("mode", MODES)
def test_links_count_as_their_targets(model, tmp_path, mode):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)

    assert weights_fingerprint(snapshot, mode=mode) == weights_fingerprint(model, mode=mode)


def flip(model, tensors, position):
    """Change one byte of the tensor `head`."""
    edited = bytearray(tensors["head"])
    edited[position] ^= 1
    tensors["head"] = bytes(edited)
    (model / "model-00001-of-00002.safetensors").write_bytes(safetensors(tensors))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", [0, BIG // 2, BIG - 1])
def test_one_byte_at_the_start_middle_or_end_of_a_tensor_changes_it(model, tensors, position, mode):
    before = weights_fingerprint(model, mode=mode)
    flip(model, tensors, position)

    assert weights_fingerprint(model, mode=mode) != before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 5000, 3 * 4096, 3 * 4096 + 1])
def test_each_byte_of_a_small_tensor_counts(tmp_path, length, mode):
    file = tmp_path / "model.safetensors"
    content = bytearray(noise(1, length))
    file.write_bytes(safetensors({"a": content}))
    prints = {weights_fingerprint(tmp_path, mode=mode)}
    spots = {0, length // 4, length // 2, length - 1}
    for spot in spots:
        content[spot] ^= 1
        file.write_bytes(safetensors({"a": content}))
        prints.add(weights_fingerprint(tmp_path, mode=mode))

    assert len(prints) == 1 + len(spots)


def test_only_full_sees_one_byte_between_the_samples(model, tensors):
    before = [weights_fingerprint(model, mode=mode) for mode in MODES]
    flip(model, tensors, BIG // 4)

    after = [weights_fingerprint(model, mode=mode) for mode in MODES]

    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"hidden_size": 9}'),
        lambda model: (model / "config.json").unlink(),
        lambda model: (model / "adapter_config.json").write_text('{"lora_alpha": 32}'),
        lambda model: (model / "preprocessor_config.json").write_text('{"image_mean": [0.5]}'),
        lambda model: (model / "video_preprocessor_config.json").write_text("{}"),
        lambda model: (model / "processor_config.json").write_text("{}"),
        lambda model: (model / "modeling_own.py").write_text("def forward(): ..."),
        lambda model: (model / "model-00002-of-00002.safetensors").unlink(),
        lambda model: (model / "model-00002-of-00002.safetensors").rename(model / "model-00003.safetensors"),
        lambda model: (model / "model-00002-of-00002.safetensors").write_bytes(
            safetensors({"last": noise(4, BIG)}, metadata={"format": "pt"})
        ),
        lambda model: (model / "model-00002-of-00002.safetensors").write_bytes(
            safetensors({"lost": noise(4, BIG)})
        ),
    ],
)
def test_settings_names_and_headers_count(model, change, mode):
    before = weights_fingerprint(model, mode=mode)
    change(model)

    assert weights_fingerprint(model, mode=mode) != before


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_stands_for_all_shards_of_its_model(tmp_path, mode):
    shards = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in (*shards, tmp_path / "other-00002-of-00002.gguf", tmp_path / "model-00002-of-00003.gguf"):
        file.write_bytes(b"1")

    before = {weights_fingerprint(shard, mode=mode) for shard in shards}
    for name in ("other-00002-of-00002.gguf", "model-00002-of-00003.gguf"):
        (tmp_path / name).write_bytes(b"2")
    assert {weights_fingerprint(shard, mode=mode) for shard in shards} == before
    assert len(before) == 1

    shards[1].write_bytes(b"2")
    assert weights_fingerprint(shards[0], mode=mode) not in before


@pytest.mark.parametrize("mode", MODES)
def test_other_files_do_not_change_the_fingerprint(model, mode):
    before = weights_fingerprint(model, mode=mode)
    (model / "README.md").write_text("hello")
    (model / "chat_template.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "tokenizer_config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"the same model in another form")
    (model / "original.safetensors").mkdir()

    assert weights_fingerprint(model, mode=mode) == before


def test_a_processor_is_identified_by_its_files_at_any_path(model, tmp_path):
    assert processor_fingerprint(model) == ""
    (model / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    (model / "tekken.json").write_text('{"image": {}}')
    first = processor_fingerprint(model)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)

    assert processor_fingerprint(elsewhere) == first
    assert processor_fingerprint(elsewhere, algorithm="sha256") != first
    (elsewhere / "tekken.json").write_text('{"image": {"max_image_size": 9}}')
    assert processor_fingerprint(elsewhere) != first
    (elsewhere / "tekken.json").unlink()
    assert processor_fingerprint(elsewhere) != first


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.gguf"])
@pytest.mark.parametrize("length", [0, 10, 1 << 20, (5 << 20) + 17])
def test_other_formats_are_read_by_the_file(tmp_path, name, length, mode):
    file = tmp_path / name
    content = bytearray(noise(5, length))
    file.write_bytes(content)
    prints = {weights_fingerprint(tmp_path, mode=mode)}
    assert prints == {weights_fingerprint(file, mode=mode)}, "a single file is a model"
    # At each end, and at the step of 1 MiB between them.
    spots = {spot for spot in (0, length - 1, 2 << 20, 3 << 20) if 0 <= spot < length}
    for spot in spots:
        content[spot] ^= 1
        file.write_bytes(content)
        prints.add(weights_fingerprint(tmp_path, mode=mode))

    assert len(prints) == 1 + len(spots)


def test_reads_that_return_fewer_bytes_are_continued(model, monkeypatch):
    """As on some file systems in user space."""

    class ShortReads(io.FileIO):
        def read(self, size=-1):
            return super().read(min(size, 1000))

    expected = weights_fingerprint(model)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: ShortReads(path))

    assert weights_fingerprint(model) == expected


def test_a_name_that_is_not_on_this_machine_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at .*on a hub"):
        weights_fingerprint(tmp_path / "org" / "model")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(FileNotFoundError, match=r"are no weights in .*\.safetensors"):
        weights_fingerprint(tmp_path)


def test_a_dangling_link_is_named(model):
    (model / "model-00003.safetensors").symlink_to(model / "gone")

    with pytest.raises(FileNotFoundError, match=r"model-00003\.safetensors"):
        weights_fingerprint(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"version https://git-lfs.github.com/spec/v1\n",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 4000) + b"[" * 4000,
        safetensors({"a": b"1234"})[:-1],
        struct.pack("<Q", 36) + b'{"a": {"data_offsets": [-1, 0]}}    ',
        struct.pack("<Q", 36) + b'{"a": {"data_offsets": [1, 0]}}     ',
        struct.pack("<Q", 36) + b'{"a": {"data_offsets": ["0", "1"]}} ',
        struct.pack("<Q", 36) + b'{"a": {"data_offsets": [0.0, 0.0]}} ',
        struct.pack("<Q", 36) + b'{"a": {}}                           ',
        struct.pack("<Q", 36) + b'{"a": 7}                            ',
    ],
)
def test_a_malformed_safetensors_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        weights_fingerprint(tmp_path)
    assert "truncated" not in str(caught.value)  # it is refused before its data is read


@pytest.mark.parametrize("mode", MODES)
def test_with_a_cryptographic_hash_the_fingerprint_is_one_too(model, mode):
    fingerprints = {weights_fingerprint(model, mode=mode, algorithm=name) for name in ("sha256", "blake3")}

    assert len(fingerprints) == 1
    assert fingerprints.pop().startswith(f"{mode}:sha256:")
