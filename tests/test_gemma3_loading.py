import json
import os
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxattn.engine.devices import weight_placer
from jaxattn.models.gemma3 import checkpoint, packaged
from jaxattn.models.gemma3.checkpoint import (
    load_config,
    load_weights,
    resolve_model,
    stream_weights,
)
from jaxattn.models.gemma3.config import CONFIGS, Gemma3Config, UnsupportedModelError
from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.weights import expected_shapes
from tests.tiny_checkpoints import (
    CONFIG,
    CONFIG_JSON,
    gguf_tensors,
    hf_tensors,
    random_weights,
    write_folder,
    write_gguf,
)

WEIGHTS = random_weights()
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
MULTIMODAL_JSON = {"model_type": "gemma3", "text_config": CONFIG_JSON}


def assert_loaded(loaded, expected, dtype="float32"):
    assert list(loaded) == list(expected)
    for name, array in expected.items():
        kept = np.float32 if array.ndim == 1 else np.dtype(dtype)
        assert loaded[name].dtype == kept, name
        assert np.array_equal(loaded[name], array.astype(kept)), name


# Shapes.


def test_shapes_of_the_270m():
    shapes = expected_shapes(CONFIGS["gemma-3-270m"])
    assert len(shapes) == 236
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 268_098_176
    assert shapes["embed"] == (262_144, 640)
    assert shapes["layers.17.q"] == (1024, 640)
    assert shapes["layers.0.k"] == shapes["layers.0.v"] == (256, 640)
    assert shapes["layers.0.o"] == (640, 1024)
    assert shapes["layers.0.down"] == (640, 2048)
    assert shapes["layers.0.q_norm"] == shapes["layers.0.k_norm"] == (256,)


# GGUF.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_gguf_plain_types(tmp_path, kind, dtype):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, gguf_tensors(WEIGHTS), kind=GGMLQuantizationType[kind])
    config, weights = load_weights(path, dtype=dtype)
    assert config == CONFIG
    expected = WEIGHTS
    if kind == "F16":
        expected = {
            name: array.astype(np.float16).astype(np.float32) if array.ndim > 1 else array
            for name, array in WEIGHTS.items()
        }
    # 1 + w rounds in the file, so norms are exact only up to that.
    norms = {n: np.float32(a + np.float32(1)) - 1 for n, a in expected.items() if a.ndim == 1}
    assert_loaded(weights, expected | norms, dtype)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "TQ2_0"])
def test_gguf_quantised_types(tmp_path, kind):
    kind = GGMLQuantizationType[kind]
    if gguf.GGML_QUANT_SIZES[kind][0] > 64:  # columns of the tiny model
        with pytest.raises(gguf.quants.QuantError):
            gguf.quantize(WEIGHTS["embed"], kind)
        return
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS), kind=kind)
    _, weights = load_weights(str(path), dtype="float32")
    for name in ("embed", "layers.0.q", "layers.6.down"):
        expected = gguf.dequantize(gguf.quantize(WEIGHTS[name], kind), kind)
        assert not np.array_equal(expected, WEIGHTS[name])
        assert np.array_equal(weights[name], expected)


def test_blocks_and_pieces_smaller_than_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 7 * 64 * 4)
    monkeypatch.setattr("jaxattn.models.gemma3.gguf._PIECE_BYTES", 3 * 64 * 4)
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS), kind=GGMLQuantizationType.Q8_0)
    folder = write_folder(tmp_path / "folder", hf_tensors(WEIGHTS))
    counts = []
    _, weights = load_weights(path, dtype="float32", progress=lambda *count: counts.append(count))
    expected = gguf.dequantize(
        gguf.quantize(WEIGHTS["embed"], GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
    )
    assert np.array_equal(weights["embed"], expected)
    assert_loaded(load_weights(folder, dtype="float32")[1], WEIGHTS)
    total = counts[-1][1]
    assert counts == [(done, total) for done in range(1, total + 1)]
    assert total > len(WEIGHTS)


def test_the_real_270m_equals_the_gguf_library():
    path = packaged.packaged_gguf()
    config, weights = load_weights(path, dtype="bfloat16")
    assert config == CONFIGS["gemma-3-270m"]
    assert {name: array.shape for name, array in weights.items()} == expected_shapes(config)
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert len(theirs) == len(weights)
    kinds = set()
    for ours, name in {
        "embed": "token_embd",
        "layers.0.q": "blk.0.attn_q",
        "layers.0.v": "blk.0.attn_v",
        "layers.17.o": "blk.17.attn_output",
        "layers.0.down": "blk.0.ffn_down",
        "layers.9.down": "blk.9.ffn_down",
    }.items():
        tensor = theirs[f"{name}.weight"]
        kinds.add(tensor.tensor_type.name)
        last = slice(-256, None)  # of 262,144 rows: a shifted block would show
        values = gguf.dequantize(tensor.data[last], tensor.tensor_type)
        assert np.array_equal(weights[ours][last], values.astype(ml_dtypes.bfloat16)), name
    assert kinds >= {"Q8_0", "Q5_0", "Q4_K", "Q6_K"}
    norm = theirs["blk.3.attn_q_norm.weight"].data
    assert weights["layers.3.q_norm"].dtype == np.float32
    assert np.array_equal(weights["layers.3.q_norm"] + np.float32(1), norm)


def test_a_vision_tower_in_gguf_is_passed_over(tmp_path):
    """As Ollama's files of 4B and up have it: its values, which may be damaged, are not read."""
    tower = {
        "v.patch_embedding.weight": np.full((4, 3, 2, 2), np.nan, np.float32),
        "v.blk.0.attn_q.bias": np.zeros(4, np.float32),
        "mm.mm_input_projection.weight": np.zeros((4, 64), np.float32),
    }
    path = write_gguf(
        tmp_path / "tiny.gguf",
        gguf_tensors(WEIGHTS) | tower,
        metadata={"gemma3.vision.block_count": 1, "gemma3.mm.tokens_per_image": 256},
    )
    config, weights = load_weights(path, dtype="float32")
    assert config == CONFIG
    assert list(weights) == list(WEIGHTS)
    assert np.array_equal(weights["embed"], WEIGHTS["embed"])


# Hugging Face folders.


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_folder(tmp_path, prefix, shards):
    config_json = CONFIG_JSON if prefix == "model." else MULTIMODAL_JSON
    tensors = hf_tensors(WEIGHTS, prefix)
    write_folder(tmp_path, tensors, config_json=config_json, shards=shards)
    config, weights = load_weights(tmp_path, dtype="bfloat16")
    assert config == CONFIG
    assert_loaded(weights, WEIGHTS, "bfloat16")
    assert_loaded(load_weights(tmp_path, dtype="float32")[1], WEIGHTS)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_folder_of_other_float_types(tmp_path, dtype):
    weights = {name: array.astype(dtype).astype(np.float32) for name, array in WEIGHTS.items()}
    write_folder(tmp_path, hf_tensors(WEIGHTS), dtype=dtype)
    assert_loaded(load_weights(tmp_path, dtype="float32")[1], weights)


@pytest.mark.parametrize(
    ("prefix", "vision", "head"),
    [
        ("language_model.model.", "vision_tower.a", "language_model.lm_head.weight"),
        ("model.language_model.", "model.vision_tower.a", "lm_head.weight"),
        ("model.language_model.", "model.multi_modal_projector.a", "lm_head.weight"),
    ],
)
def test_image_tower_and_physical_head_are_left_out(tmp_path, prefix, vision, head):
    tensors = hf_tensors(WEIGHTS, prefix)
    tensors |= {vision: np.zeros((2, 2), np.int64), head: WEIGHTS["embed"]}
    write_folder(tmp_path, tensors, config_json=MULTIMODAL_JSON)
    assert_loaded(load_weights(tmp_path, dtype="float32", images=False)[1], WEIGHTS)


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_padding_rows_of_multimodal_vocabularies_are_cut(tmp_path, form):
    padded = np.ones((262_208, 8), np.float32)
    padded[262_144:] = np.nan  # not even read
    shape = Gemma3Config(
        embed_dim=8,
        mlp_dim=4,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=2,
        query_scale=1.0,
        max_position=8,
        layers=CONFIG.layers[:1],
    )
    weights = random_weights(shape) | {"embed": padded}
    if form == "gguf":
        sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 4}
        sizes |= {"attention.key_length": 2, "attention.value_length": 2}
        pieces = [f"<{token}>" for token in range(262_208)], [0.0] * 262_208, [1] * 262_208
        path = write_gguf(
            tmp_path / "tiny.gguf",
            gguf_tensors(weights),
            metadata={f"gemma3.{name}": size for name, size in sizes.items()},
            pieces=pieces,
        )
    else:
        sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 4, "head_dim": 2}
        config_json = CONFIG_JSON | sizes | {"vocab_size": 262_208}
        path = write_folder(tmp_path, hf_tensors(weights), config_json=config_json)
    config, loaded = load_weights(path, dtype="bfloat16")
    assert config.vocab_size == 262_144
    assert loaded["embed"].shape == (262_144, 8)
    assert (loaded["embed"] == 1).all()


# Every tensor is accounted for.

BOTH = pytest.mark.parametrize("form", ["gguf", "folder"])
Q_NORM = {"gguf": "blk.3.attn_q_norm.weight", "folder": "model.layers.3.self_attn.q_norm.weight"}
DOWN = {"gguf": "blk.0.ffn_down.weight", "folder": "model.layers.0.mlp.down_proj.weight"}


def tensors_of(form):
    return gguf_tensors(WEIGHTS) if form == "gguf" else hf_tensors(WEIGHTS)


def write(form, path, tensors):
    if form == "gguf":
        return write_gguf(path / "tiny.gguf", tensors)
    return write_folder(path, tensors)


@BOTH
def test_all_problems_are_in_one_error(tmp_path, form):
    tensors = tensors_of(form)
    del tensors[Q_NORM[form]]
    tensors[DOWN[form]] = tensors[DOWN[form]][:, :32]
    tensors["extra.bias"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_weights(write(form, tmp_path, tensors), dtype="float32")
    message = str(caught.value)
    assert f"missing: {Q_NORM[form]}" in message
    assert f"wrong shape: {DOWN[form]} is (64, 32), expected (64, 128)" in message
    assert "unexpected: extra.bias (3,)" in message


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(tmp_path, form, value):
    tensors = tensors_of(form)
    for names in (Q_NORM, DOWN):
        tensors[names[form]] = tensors[names[form]].copy()
        tensors[names[form]].flat[-1] = value
    with pytest.raises(CheckpointError, match="NaN or infinity") as caught:
        load_weights(write(form, tmp_path, tensors), dtype="bfloat16")
    assert Q_NORM[form] in str(caught.value)
    assert DOWN[form] in str(caught.value)


def test_an_embedding_longer_than_the_config_says(tmp_path):
    tensors = hf_tensors(WEIGHTS)
    name = "model.embed_tokens.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:64]])
    with pytest.raises(CheckpointError, match=r"wrong shape: model\.embed_tokens\.weight"):
        load_weights(write_folder(tmp_path, tensors), dtype="float32")


def test_another_model_is_refused(tmp_path):
    write_folder(tmp_path, hf_tensors(WEIGHTS), config_json=CONFIG_JSON | {"model_type": "llama"})
    with pytest.raises(UnsupportedModelError, match="model_type='llama'"):
        load_weights(tmp_path, dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "int8", None])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=r"weights are kept in one of \('float32', 'bfloat16'\)"):
        load_weights(tmp_path, dtype=dtype)


# Damaged files.


@pytest.fixture
def tiny_gguf(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS))


def test_truncated_gguf(tiny_gguf):
    os.truncate(tiny_gguf, tiny_gguf.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match=r"is truncated: tensor .* fetch or copy it again"):
        load_weights(tiny_gguf, dtype="float32")


@pytest.mark.parametrize("size", [5, 20, 100, 3000])
def test_gguf_cut_in_its_header(tiny_gguf, size):
    os.truncate(tiny_gguf, size)
    with pytest.raises(CheckpointError, match="header is damaged"):
        load_weights(tiny_gguf, dtype="float32")


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is not a GGUF file: it begins with b''"),
        (lambda data: b"PK\3\4" + data[4:], r"begins with b'PK\\x03\\x04', not b'GGUF'"),
        (lambda data: data[:4] + b"\1\0\0\0" + data[8:], "GGUF version 1; versions 2 and 3"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "header is damaged"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "header is damaged"),
        (lambda data: data.replace(b"general.arch", b"\xff\xfe\xfdral.arch"), "header is damaged"),
    ],
)
def test_not_a_gguf_file(tiny_gguf, change, message):
    tiny_gguf.write_bytes(change(tiny_gguf.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        load_weights(tiny_gguf, dtype="float32")


def tensor_record(name: str, kind: int) -> bytes:
    """What a header says of a `[64, 64]` tensor, up to its offset."""
    ints = np.array([2], "<u4").tobytes() + np.array([64, 64], "<u8").tobytes()
    return name.encode() + ints + np.array([kind], "<u4").tobytes()


def test_a_type_without_dequantisation_is_named(tiny_gguf):
    name = "blk.2.attn_q.weight"
    i32 = GGMLQuantizationType.I32.value
    replace_bytes(tiny_gguf, tensor_record(name, 0), tensor_record(name, i32))
    with pytest.raises(CheckpointError, match=r"cannot dequantise blk\.2\.attn_q\.weight \(I32\)"):
        load_weights(tiny_gguf, dtype="float32")


def test_an_unknown_type_is_named(tiny_gguf):
    name = "blk.2.attn_q.weight"
    replace_bytes(tiny_gguf, tensor_record(name, 0), tensor_record(name, 999))
    with pytest.raises(CheckpointError, match=r"'blk\.2\.attn_q\.weight' is of type 999"):
        load_weights(tiny_gguf, dtype="float32")


def test_rows_that_are_no_whole_blocks(tiny_gguf):
    name = "blk.2.attn_q.weight"
    q4_k = GGMLQuantizationType.Q4_K.value  # of 256 values
    replace_bytes(tiny_gguf, tensor_record(name, 0), tensor_record(name, q4_k))
    with pytest.raises(CheckpointError, match=r"blk\.2\.attn_q\.weight.*64.*Q4_K"):
        load_weights(tiny_gguf, dtype="float32")


def test_a_part_of_a_split_gguf(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", gguf_tensors(WEIGHTS), metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts: join them"):
        load_weights(path, dtype="float32")


@pytest.fixture
def tiny_folder(tmp_path):
    return write_folder(tmp_path / "folder", hf_tensors(WEIGHTS), shards=3)


INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def test_folder_without_config(tiny_folder):
    (tiny_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_weights(tiny_folder, dtype="float32")


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "no JSON object")])
def test_config_that_is_no_object(tiny_folder, text, message):
    (tiny_folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tiny_folder, dtype="float32")


def test_folder_without_weights(tiny_folder):
    (tiny_folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safet"):
        load_weights(tiny_folder, dtype="float32")


def test_missing_shard(tiny_folder):
    (tiny_folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"names missing files: \\['{SHARD}'\\]"):
        load_weights(tiny_folder, dtype="float32")


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_truncated_shard(tiny_folder, size):
    shard = tiny_folder / SHARD
    os.truncate(shard, size % shard.stat().st_size)
    with pytest.raises(CheckpointError, match=f"{SHARD} is damaged or truncated"):
        load_weights(tiny_folder, dtype="float32")


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_index_that_names_another_shard(tiny_folder):
    name = "model.norm.weight"
    change_index(
        tiny_folder,
        lambda index: index["weight_map"].update(
            {name: SHARD if index["weight_map"][name] != SHARD else SHARD.replace("2-", "1-")}
        ),
    )
    with pytest.raises(CheckpointError, match=r"not where the index says: model\.norm\.weight"):
        load_weights(tiny_folder, dtype="float32")


def test_index_that_leaves_a_tensor_out_or_invents_one(tiny_folder):
    change_index(tiny_folder, lambda index: index["weight_map"].pop("model.norm.weight"))
    change_index(tiny_folder, lambda index: index["weight_map"].update(invented=SHARD))
    with pytest.raises(CheckpointError, match=r"not where the index says: invented, model\.norm"):
        load_weights(tiny_folder, dtype="float32")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_a_map(tiny_folder, weight_map):
    change_index(tiny_folder, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(CheckpointError, match="weight_map must map"):
        load_weights(tiny_folder, dtype="float32")


def test_folder_of_integers(tmp_path):
    tensors = hf_tensors(WEIGHTS)
    tensors[DOWN["folder"]] = tensors[DOWN["folder"]].astype(np.int8)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight \(I8\): weights are read from"):
        load_weights(write_folder(tmp_path, tensors), dtype="float32")


def test_folder_of_other_names(tmp_path):
    write_folder(tmp_path, hf_tensors(WEIGHTS, "transformer."))
    with pytest.raises(CheckpointError, match=r"no tensor is called embed_tokens\.weight"):
        load_weights(tmp_path, dtype="float32")


# Memory.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_takes_the_arrays_without_a_copy(tiny_gguf, dtype):
    place, pointers = weight_placer(CONFIG, None), {}

    def spy(name, weight):
        pointers[name] = weight.ctypes.data
        return place(name, weight)

    _, weights = stream_weights(tiny_gguf, dtype=dtype, place=spy)
    for name, array in weights.items():
        assert array.unsafe_buffer_pointer() == pointers[name], name


def test_weights_are_placed_one_by_one(tiny_gguf, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 16 * 64 * 4)
    _, whole = load_weights(tiny_gguf, dtype="float32")
    sizes = {name: array.nbytes for name, array in whole.items()}
    placed, alive = [], []

    def place(name, weight):
        assert np.array_equal(weight, whole[name])
        alive.append(weakref.ref(weight))
        assert [each() is None for each in alive] == [True] * len(placed) + [False]
        placed.append(name)
        return len(placed)

    tracemalloc.start()
    try:
        _, numbers = stream_weights(tiny_gguf, dtype="float32", place=place)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert numbers == {name: number for number, name in enumerate(sizes, start=1)}
    assert peak < sum(sizes.values()) / 2


def test_nothing_is_placed_of_files_with_the_wrong_tensors(tmp_path):
    tensors = tensors_of("folder")
    del tensors["model.norm.weight"]  # the last to be read
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        stream_weights(
            write("folder", tmp_path, tensors), dtype="float32", place=lambda *_: pytest.fail()
        )


@BOTH
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_nothing_is_placed_of_files_with_a_nan(tmp_path, form, quantize):
    tensors = tensors_of(form)
    tensors[Q_NORM[form]] = np.full_like(tensors[Q_NORM[form]], np.nan)
    path = write(form, tmp_path, tensors)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        stream_weights(path, dtype="float32", place=lambda *_: pytest.fail(), quantize=quantize)


@BOTH
def test_what_was_placed_of_a_file_that_becomes_shorter_is_dropped(tmp_path, form, monkeypatch):
    monkeypatch.setattr(checkpoint, "_THREADS", 1)  # reads a few weights ahead
    path = write(form, tmp_path, tensors_of(form))
    file = path if form == "gguf" else path / "model.safetensors"
    placed = []

    def place(name, weight):
        array = jax.device_put(weight)
        placed.append(weakref.ref(array))
        if len(placed) == 20:
            os.truncate(file, file.stat().st_size // 2)
        return array

    with pytest.raises(CheckpointError, match="while it was read") as caught:
        stream_weights(path, dtype="float32", place=place)
    assert 20 <= len(placed) < len(WEIGHTS)
    assert [each for each in placed if each() is not None] == []
    del caught  # its traceback has held the frames, and they hold no weights


PEAK = """
import sys
import gguf, jax, numpy, safetensors
from jaxattn.models.gemma3.checkpoint import load_weights
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = memory("VmRSS:")
_, weights = load_weights(sys.argv[1], dtype=sys.argv[2])
kept = sum(array.nbytes for array in weights.values())
print((memory("VmHWM:") - before) / kept)
"""
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def peak_over_weights(path: Path, dtype: str) -> float:
    """Peak resident memory while loading, without what was there before, over the weights' bytes.

    In a process of its own. Not `ru_maxrss`: a child inherits the peak of its parent there.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), dtype], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


@ON_LINUX
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_the_real_gguf(dtype):
    assert 0.95 < peak_over_weights(packaged.packaged_gguf(), dtype) < 1.25


@ON_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_peak_memory_of_a_folder(tmp_path, shards):
    _, weights = load_weights(packaged.packaged_gguf(), dtype="bfloat16")
    layers = range(CONFIG.num_layers)
    config_json = {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    }
    few = {
        name: array
        for name, array in weights.items()
        if not name.startswith("layers.") or int(name.split(".")[1]) in layers
    }
    write_folder(tmp_path, hf_tensors(few), config_json=config_json, shards=shards)
    assert 0.95 < peak_over_weights(tmp_path, "bfloat16") < 1.25


@pytest.mark.parametrize("loading", [False, True])  # or still checking
def test_an_interrupt_stops_the_loading(tmp_path, monkeypatch, loading):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 64 * 4)
    monkeypatch.setattr(checkpoint, "_THREADS", 1)
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS))
    reads = []
    stored = checkpoint.GGUFFile._stored
    monkeypatch.setattr(
        checkpoint.GGUFFile, "_stored", lambda *args: (reads.append(args), stored(*args))[1]
    )

    def interrupt(done: int, total: int) -> None:
        if not loading or done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_weights(path, dtype="float32", progress=interrupt)
    interrupted = len(reads)
    load_weights(path, dtype="float32")
    assert interrupted < (len(reads) - interrupted) * (0.75 if loading else 0.25)


# Finding the weights.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the package with the weights, and an empty cache folder."""
    calls = []

    def assemble(path, overwrite=False):
        calls.append(Path(path))
        Path(path).write_bytes(b"weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "_SIZE", 7)
    monkeypatch.setitem(sys.modules, packaged._PACKAGE, SimpleNamespace(assemble=assemble))
    return SimpleNamespace(calls=calls, cache=tmp_path / "cache" / "jaxattn")


def test_packaged_weights_are_assembled_once(package):
    path = packaged.packaged_gguf()
    assert path.parent == package.cache
    assert path.read_bytes() == b"weights"
    assert resolve_model("gemma-3-270m") == path
    assert len(package.calls) == 1
    assert package.calls[0] != path  # written elsewhere, then moved: whole or not at all
    assert list(package.cache.iterdir()) == [path]


def test_a_cached_file_of_another_size_is_replaced(package):
    packaged.packaged_gguf().write_bytes(b"cut")
    assert packaged.packaged_gguf().read_bytes() == b"weights"
    assert len(package.calls) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_interrupted_assembly_leaves_nothing(package, monkeypatch, error):
    def assemble(path):
        Path(path).write_bytes(b"wei")
        raise error

    monkeypatch.setattr(sys.modules[packaged._PACKAGE], "assemble", assemble)
    with pytest.raises(error):
        packaged.packaged_gguf()
    assert list(package.cache.iterdir()) == []


def test_without_the_package(package, monkeypatch):
    monkeypatch.setitem(sys.modules, packaged._PACKAGE, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxattn\[gemma3-270m\]'.*terms"):
        resolve_model("gemma-3-270m")


def test_resolving_paths(tiny_gguf, tiny_folder):
    assert resolve_model(str(tiny_gguf)) == tiny_gguf
    assert resolve_model(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize("size", sorted(CONFIGS.keys() - {"gemma-3-270m"}))
def test_only_the_270m_is_packaged(size):
    with pytest.raises(ValueError, match=f"'{size}' has no packaged weights"):
        resolve_model(size)


def test_resolving_nonsense():
    with pytest.raises(ValueError, match="'no/such/model' is neither a file nor a folder nor"):
        resolve_model("no/such/model")


def test_config_alone(tiny_gguf, tiny_folder):
    assert load_config("gemma-3-27b") == CONFIGS["gemma-3-27b"]
    assert load_config(str(tiny_gguf)) == load_config(str(tiny_folder)) == CONFIG
