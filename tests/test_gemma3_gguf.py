"""Damaged GGUF files: one clear error, whatever the damage, and nothing large is allocated."""

import struct
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.gguf import GGUFFile
from jaxattn.models.gemma3.tokenizer import load_tokenizer
from tests.tiny_checkpoints import gguf_tensors, random_weights, write_gguf

WEIGHTS = random_weights()
# Far more than the header of the tiny file needs, far less than a count that is taken at its word.
MOST_BYTES = 8 * 2**20
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A good file: matrices in Q8_0, so that damaged scales are NaN."""
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write_gguf(path, gguf_tensors(WEIGHTS), kind=GGMLQuantizationType.Q8_0)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "damaged.gguf"


def loads(path: Path) -> bool:
    """Whether weights and tokenizer load. Another error, or a large allocation, fails the test."""
    tracemalloc.start()
    try:
        load_weights(path, dtype="float32")
        load_tokenizer(path)
    except CheckpointError as error:
        assert "damaged.gguf" in str(error)
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES
    return True


def header_end(data: bytes, path: Path) -> int:
    """Where the first tensor begins."""
    path.write_bytes(data)
    return min(tensor.offset for tensor in GGUFFile(path).tensors.values())


def test_cut_anywhere(whole, path):
    assert len(whole) < MOST_BYTES / 4
    start = header_end(whole, path)
    cuts = {*range(0, start, 131), *range(28), start - 1, start, start + 1}
    cuts |= {*range(start, len(whole), 20_011), len(whole) - 33}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        assert not loads(path), cut
    path.write_bytes(whole)
    assert loads(path)


@FUZZ
@given(st.integers(0, 2**32), st.integers(0, 255))
def test_one_changed_byte(whole, path, place, value):
    """A header byte or a weight: an error, or a file that is as good."""
    start = header_end(whole, path)
    damaged = bytearray(whole)
    damaged[place % start if place % 4 else place % len(whole)] = value
    path.write_bytes(damaged)
    loads(path)


@FUZZ
@given(st.binary(max_size=300))
@example(struct.pack("<IQQ", 3, 2**60, 0))
@example(struct.pack("<IQQ", 3, 0, 2**60))
@example(struct.pack("<IQQQ", 3, 0, 1, 2**60))
def test_garbage_after_the_magic(path, data):
    path.write_bytes(b"GGUF" + data)
    assert not loads(path)


@FUZZ
@given(st.binary(max_size=300))
def test_garbage_after_the_version(path, data):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + data)
    assert not loads(path)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


ARRAY, UINT32 = GGUFValueType.ARRAY.value, GGUFValueType.UINT32.value


@pytest.mark.parametrize("element", range(14))
@pytest.mark.parametrize("count", [2**60, 2**64 - 1, 2**33])
def test_counts_that_no_file_holds(path, element, count):
    array = entry("key", ARRAY, struct.pack("<IQ", element, count))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(64))
    with pytest.raises(CheckpointError, match="header is damaged"):
        load_weights(path, dtype="float32")


def test_arrays_of_arrays_do_not_recurse(path):
    depth = 2 * sys.getrecursionlimit()
    nested = entry("key", ARRAY, struct.pack("<IQ", ARRAY, 1) * depth)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)
    with pytest.raises(CheckpointError, match="an array of arrays"):
        load_weights(path, dtype="float32")


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + axes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor("a", ())], "'a' has 0 axes"),
        ([tensor("a", (1,) * 5)], "'a' has 5 axes"),
        ([tensor("a", (0, 4))], r"'a' has shape \(4, 0\)"),
        ([tensor("a", (33,), kind=8)], r"'a' has shape \(33,\); Q8_0 is stored in blocks of 32"),
        ([tensor("a", (2**40, 2**40))], "truncated: tensor 'a' ends at byte 4835703278458"),
        ([tensor("a", (4,), offset=2**64 - 1)], "truncated: tensor 'a'"),
        ([tensor("a", (4,)), tensor("a", (4,), offset=32)], "two tensors have one name"),
        ([tensor("a", (16,)), tensor("b", (16,), offset=32)], "'a' and 'b' overlap"),
        ([tensor("a", (4,), kind=4711)], "'a' is of type 4711, which the gguf library"),
        ([tensor("a", (4,), kind=GGMLQuantizationType.I8.value)], r"dequantise a \(I8\)"),
    ],
)
def test_impossible_tensors(path, tensors, message):
    count = struct.pack("<IQQ", 3, len(tensors), 0)
    path.write_bytes(b"GGUF" + count + b"".join(tensors) + bytes(4096))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("general.alignment", UINT32, bytes(4))], "general.alignment=0"),
        ([entry("general.alignment", 8, string("32"))], "general.alignment='32'"),
        ([entry("a", UINT32, bytes(4))] * 2, "two entries are called 'a'"),
        ([entry("a", 13, bytes(4))], "13 is not a valid GGUFValueType"),
    ],
)
def test_impossible_metadata(path, entries, message):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma3.block_count": 2**31}, "num_layers=2147483648"),
        ({"gemma3.attention.head_count_kv": 0}, "num_kv_heads=0"),
        ({"gemma3.attention.head_count_kv": 3}, "num_q_heads=2 is not a multiple"),
        ({"gemma3.attention.key_length": 33, "gemma3.attention.value_length": 33}, "is odd"),
        ({"gemma3.attention.sliding_window": 0}, "sliding_window=0"),
        ({"gemma3.rope.freq_base": 0}, r"rope_theta=0\.0"),
        ({"gemma3.attention.scale": 0}, r"query_scale=0\.0"),
        ({"gemma3.attention.layer_norm_rms_epsilon": 0}, r"rms_norm_eps=0\.0"),
    ],
)
def test_metadata_of_no_possible_model(path, changes, message):
    write_gguf(path, {}, metadata={})
    with pytest.raises(CheckpointError, match="missing: token_embd"):
        load_weights(path, dtype="float32")
    metadata = GGUFFile(path).metadata
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in metadata.items():
        if isinstance(value, int) and not key.startswith("general.") and key not in changes:
            writer.add_uint32(key, value)
    for key, value in changes.items():
        writer.add_uint32(key, value)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"damaged.gguf describes no possible .*{message}"):
        load_weights(path, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.model is 'gpt2', expected 'llama'"),
        ({"tokenizer.ggml.scores": None}, "the metadata lack tokenizer.ggml.scores"),
        ({"tokenizer.ggml.tokens": "abc"}, "are not three arrays"),
        ({"tokenizer.ggml.scores": [0.5]}, r"len\(scores\)=1"),
        ({"tokenizer.ggml.token_type": [99] * 300}, "the vocabulary is damaged"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "the vocabulary is damaged"),
    ],
)
def test_damaged_vocabularies(path, changes, message):
    write_gguf(path, {})
    metadata = GGUFFile(path).metadata | changes
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in metadata.items():
        if not key.startswith("tokenizer.ggml") or value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"damaged\.gguf.*{message}"):
        load_tokenizer(path)


def test_another_architecture(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"damaged\.gguf: the file holds a 'llama' model"):
        load_weights(path, dtype="float32")


def test_metadata_of_every_type(path):
    writer = gguf.GGUFWriter(path, "gemma3")
    numbers = {
        "uint8": 200, "int8": -5, "uint16": 60_000, "int16": -30_000, "uint32": 2**32 - 1,
        "int32": -(2**31), "uint64": 2**63, "int64": -(2**40), "float32": 0.5, "float64": 0.1,
        "bool": True,
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_string("a.string", "h\u00e9")
    writer.add_array("a.strings", ["x", "", "\u2581"])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    for kind, value in numbers.items():
        assert metadata[f"a.{kind}"] == value
        assert type(metadata[f"a.{kind}"]) is type(value)
    assert metadata["a.string"] == "h\u00e9"
    assert metadata["a.strings"] == ["x", "", "\u2581"]
    assert metadata["a.floats"].tolist() == [0.5, 1.5]


READABLE = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS",
]  # fmt: skip


@pytest.mark.parametrize("kind", READABLE)
def test_rows_of_every_common_type(path, kind):
    """Any bytes are a tensor of any type: ours are as the library dequantises them, row by row."""
    kind = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 100, (700, 2 * 256 // block * size), dtype=np.uint8)
    record = tensor("a", (512, 700), kind.value)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + record
    path.write_bytes(head + bytes(-len(head) % 32) + stored.tobytes())
    pieces = list(GGUFFile(path).rows("a", slice(10, 690)))
    assert (pieces[0][0].start, pieces[-1][0].stop) == (10, 690)
    assert all(first.stop == second.start for (first, _), (second, _) in pairwise(pieces))
    expected = gguf.quants.dequantize(stored, kind)
    for rows, values in pieces:
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected[rows])


def dequantisable(kind):
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, gguf.quants.QuantError):
        return False
    return True


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if dequantisable(kind)])
def test_finite_is_what_dequantises_to_finite_values(path, kind):
    """Of random bytes many blocks are not; with every such row left out, all others are."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (500, 512 // block * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.quants.dequantize(stored, kind)).all(axis=1)
    record = tensor("a", (512, 500), kind.value)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + record
    path.write_bytes(head + bytes(-len(head) % 32) + stored.tobytes())
    file = GGUFFile(path)
    found = [file.is_finite("a", slice(row, row + 1)) for row in range(500)]
    assert found == finite.tolist()
    assert file.is_finite("a", slice(0, 500)) == finite.all()
