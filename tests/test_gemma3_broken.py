"""Broken checkpoints through `LLM`: one clear error, and nothing goes to a device."""

import gc
import json
import os
import re
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxattn import LLM
from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.saved import save_checkpoint
from jaxattn.models.gemma3.tokenizer import tokenizer_file
from tests.tiny_checkpoints import (
    CONFIG,
    gguf_tensors,
    hf_tensors,
    random_weights,
    write_folder,
    write_gguf,
)

WEIGHTS = random_weights()
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> tuple[str, bytes]:
    return tokenizer_file(write_gguf(tmp_path_factory.mktemp("tokenizer") / "a.gguf", {}))


@pytest.fixture
def refused(monkeypatch, tokenizer):
    """Asserts that a checkpoint is refused with this message, and nothing went to a device."""

    def no_device(*args, **kwargs):
        raise AssertionError("an array went to a device")

    def check(path: Path, message: str) -> None:
        if path.is_dir():
            (path / tokenizer[0]).write_bytes(tokenizer[1])
        gc.collect()  # what earlier tests left would else be gone in between
        before = len(jax.live_arrays())
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=message):
            patch.setattr(jax, "device_put", no_device)
            patch.setattr(jax, "make_array_from_callback", no_device)
            LLM(path, dtype="float32", max_model_len=64, progress=False)
        gc.collect()
        assert len(jax.live_arrays()) <= before

    return check


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "folder", hf_tensors(WEIGHTS), shards=3)


def change_index(folder: Path, **metadata) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"metadata": metadata}))


def change_header(path: Path, change) -> None:
    """Of a safetensors file: `change(header)`, with the tensors' bytes as they were."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])


def first_of(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name != "__metadata__")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: first_of(header).update(data_offsets=[0, 10**12]),
        lambda header: first_of(header).update(data_offsets=[8, 4]),
        lambda header: first_of(header).update(data_offsets=[-4, 0]),
        lambda header: first_of(header).update(shape=[3, 5]),
        lambda header: first_of(header).update(dtype="BF17"),
        lambda header: first_of(header).pop("shape"),
        lambda header: header.clear(),
    ],
)
def test_safetensors_whose_header_does_not_fit_its_bytes(folder, refused, change):
    change_header(folder / SHARD, change)
    refused(folder, rf"{SHARD} is damaged or truncated|not where the index says")


def test_a_length_of_header_that_no_file_has(folder, refused):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(struct.pack("<Q", 2**63) + data[8:])
    refused(folder, f"{SHARD} is damaged or truncated")


def test_truncated_missing_and_empty_shards(folder, refused):
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, size - 1)
    refused(folder, f"{SHARD} is damaged or truncated")
    os.truncate(folder / SHARD, 0)
    refused(folder, f"{SHARD} is damaged or truncated")
    (folder / SHARD).unlink()
    refused(folder, f"names missing files: \\['{SHARD}'\\]")


def test_a_total_size_of_other_files(folder, refused):
    total = sum(array.size for array in WEIGHTS.values()) * 2
    change_index(folder, total_size=total)
    assert load_weights(folder, dtype="float32")[0] == CONFIG
    for wrong in (total - 2, total + 2, "many"):
        change_index(folder, total_size=wrong)
        refused(folder, f"the tensors take {wrong} bytes, and the files hold {total}")


def test_a_tensor_that_two_shards_hold(folder, refused):
    """The second would have been taken, or the first: nobody knows."""
    one, other = folder / SHARD, folder / SHARD.replace("2-", "3-")
    other.write_bytes(one.read_bytes())
    refused(folder, rf"is in {SHARD} and in {other.name}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.3.mlp.up_proj.weight", np.nan, r"NaN or infinity in model\.layers\.3\.mlp"),
        ("model.norm.weight", -np.inf, r"NaN or infinity in model\.norm\.weight"),
    ],
)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_values_that_are_not_finite(tmp_path, refused, name, value, message, quantize):
    tensors = hf_tensors(WEIGHTS)
    tensors[name] = tensors[name].copy()
    tensors[name].flat[5] = value
    path = write_folder(tmp_path / "a", tensors)
    refused(path, message)
    with pytest.raises(CheckpointError, match=message):
        load_weights(path, dtype="float32", quantize=quantize)


def test_weights_of_other_types(tmp_path, refused):
    tensors = hf_tensors(WEIGHTS) | {"model.norm.weight": np.zeros(64, np.uint8)}
    refused(write_folder(tmp_path / "a", tensors), r"model\.norm\.weight \(U8\): weights are read")


def test_gguf(tmp_path, refused):
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS))
    size = path.stat().st_size
    for cut, message in ((size - 4096, "is truncated"), (3000, "damaged"), (0, "not a GGUF file")):
        os.truncate(path, cut)
        refused(path, message)
        write_gguf(path, gguf_tensors(WEIGHTS))
    broken = gguf_tensors(WEIGHTS)
    broken["blk.0.attn_q.weight"] = broken["blk.0.attn_q.weight"] * np.float32(np.nan)
    refused(write_gguf(path, broken), r"NaN or infinity in blk\.0\.attn_q\.weight")


def test_our_own(tmp_path, refused, tokenizer):
    path = tmp_path / "model"
    save_checkpoint(path, CONFIG, WEIGHTS, tokenizer)
    stored = max((path / "weights").rglob("*"), key=lambda each: each.stat().st_size)
    content = stored.read_bytes()
    os.truncate(stored, 100)
    refused(path, f"{stored.name} has 100 bytes, not {len(content)}")
    stored.write_bytes(bytes(len(content)))
    refused(path, "damaged")
    stored.unlink()
    refused(path, f"{stored.name} is missing")


# A physical head, though Gemma 3's is the embedding.


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_that_is_the_embedding_is_left_out(tmp_path, shards):
    tensors = hf_tensors(WEIGHTS) | {HEAD: WEIGHTS["embed"]}
    _, weights = load_weights(write_folder(tmp_path / "a", tensors, shards=shards), dtype="float32")
    assert list(weights) == list(WEIGHTS)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_head_in_gguf(tmp_path, refused, kind):
    """As in a folder: left out if it is the embedding, else refused."""
    tensors, path = gguf_tensors(WEIGHTS), tmp_path / "tiny.gguf"
    kind = GGMLQuantizationType[kind]
    write_gguf(path, tensors | {"output.weight": WEIGHTS["embed"]}, kind=kind)
    assert list(load_weights(path, dtype="float32")[1]) == list(WEIGHTS)
    head = WEIGHTS["embed"].copy()
    head[270, 3] += 1
    write_gguf(path, tensors | {"output.weight": head}, kind=kind)
    refused(path, r"output\.weight differs from token_embd\.weight in rows 0 to 300: only a head")
    write_gguf(path, tensors | {"output.weight": head[:299]}, kind=kind)
    refused(path, r"wrong shape: output\.weight is \(299, 64\), expected \(300, 64\)")


def test_another_head_is_refused(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("jaxattn.models.gemma3.checkpoint._BLOCK_BYTES", 64 * 4 * 100)
    head = WEIGHTS["embed"].copy()
    head[270, 3] += 1
    path = write_folder(tmp_path / "a", hf_tensors(WEIGHTS) | {HEAD: head})
    message = rf"lm_head\.weight differs from {EMBED} in rows 200 to 300: only a head that is"
    refused(path, message)
    for wrong in (head[:, :32], head[:299]):
        path = write_folder(tmp_path / "b", hf_tensors(WEIGHTS) | {HEAD: wrong})
        shape = re.escape(str(wrong.shape))
        refused(path, rf"wrong shape: lm_head\.weight is {shape}, expected \(300, 64\)")
    path = write_folder(tmp_path / "d", hf_tensors(WEIGHTS) | {HEAD: head.astype(np.int8)})
    refused(path, r"lm_head\.weight \(I8\)")


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_models_that_were_saved_without_a_head(tmp_path, prefix):
    path = write_folder(tmp_path / "a", hf_tensors(WEIGHTS, prefix))
    np.testing.assert_array_equal(load_weights(path, dtype="float32")[1]["embed"], WEIGHTS["embed"])
