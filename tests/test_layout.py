"""The page layout: shapes, writing, reading, scales, and the null page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import kv_pages_shape
from jaxattn.kernels.layout import (
    KVLayout,
    QuantizedPages,
    page_array,
    quantize,
    read_pages,
    write_tokens,
)
from jaxattn.spec import KV_DTYPES
from tests.attention_cases import expected_pool, laid_out, make_case

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
GEOMETRY = {"num_pages": 7, "page_size": 4, "num_kv_heads": 3, "head_dim": 8}


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_shapes(dtype):
    shape = kv_pages_shape(**GEOMETRY, dtype=dtype)
    leaves = jax.tree.leaves(shape)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # Three heads of 8: K and V of a head share a vector; int8 pads the heads to four in a word.
    assert (
        page_array(shape).shape
        == {
            4: (7, 4, 3, 1, 128),
            2: (7, 4, 2, 2, 128),
            1: (7, 4, 1, 4, 128),
        }[jnp.dtype(dtype).itemsize]
    )
    assert page_array(shape).dtype == dtype
    assert isinstance(shape, QuantizedPages) == (dtype in QUANTIZED)
    if dtype in QUANTIZED:
        assert (shape.scales.shape, shape.scales.dtype) == ((7, 2, 16), jnp.float32)
    else:
        assert len(leaves) == 1


@pytest.mark.parametrize("name", GEOMETRY)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_wrong_sizes_are_refused(name, value, error):
    with pytest.raises(error, match=f"{name}={value}"):
        kv_pages_shape(**GEOMETRY | {name: value}, dtype="float32")


def test_wrong_dtype_and_backend_are_refused():
    with pytest.raises(ValueError, match="dtype='int4': a cache stores one of float32, bfloat16"):
        kv_pages_shape(**GEOMETRY, dtype="int4")
    with pytest.raises(ValueError, match=r"backend='cuda': the backends are .*'xla'"):
        kv_pages_shape(**GEOMETRY, dtype="float32", backend="cuda")


@pytest.mark.parametrize(
    ("dtype", "largest"), [("int8", 127), ("float8_e4m3fn", 448), ("float8_e5m2", 57344)]
)
def test_quantize(dtype, largest):
    """The largest element of a row uses the whole range; the error is half a step."""
    tokens = np.random.default_rng(0).standard_normal((50, 2, 8)).astype(np.float32)
    tokens *= np.logspace(-6, 6, 50, dtype=np.float32)[:, None, None]  # rows of any magnitude
    tokens[7, 1] = 0
    values, scales = map(np.asarray, quantize(jnp.asarray(tokens), jnp.dtype(dtype)))
    assert (values.dtype, values.shape, scales.shape) == (dtype, (50, 2, 8), (50, 2))
    assert np.isfinite(values.astype(np.float32)).all() and np.isfinite(scales).all()
    assert not values[7, 1].any() and scales[7, 1] == 0
    reached = np.delete(np.abs(values.astype(np.float32)).max(axis=-1).reshape(-1), 15)
    np.testing.assert_array_equal(reached, largest)
    restored = values.astype(np.float32) * scales[..., None]
    top = np.abs(tokens).max(axis=-1, keepdims=True)
    if dtype == "int8":
        assert (np.abs(restored - tokens) <= top / 254 * 1.001).all()
    else:
        half_step = 2.0 ** -(jnp.finfo(dtype).nmant + 1)
        assert (np.abs(restored - tokens) <= np.abs(tokens) * half_step + top * 1e-2).all()


def write(case):
    arrays = (case.keys, case.values, case.kv_lens, case.table, case.cu_q_lens, case.distribution)
    return write_tokens(case.pages(), *map(jnp.asarray, arrays))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
def test_what_is_written_is_read(kv_dtype):
    case = make_case([(1, 9), (6, 6), (3, 14)], page_size=4, kv_heads=2, kv_dtype=kv_dtype, seqs=5)
    pages = write(case)
    pool = laid_out(*expected_pool(case))
    np.testing.assert_array_equal(np.asarray(page_array(pages)), page_array(pool))
    for sequence, (_, kv_len) in enumerate(case.lengths):
        ids = jnp.asarray(case.table[sequence])
        read = read_pages(pages, ids, num_kv_heads=2, head_dim=8)
        for tokens, stored in zip(read, case.stored[sequence], strict=True):
            assert tokens.shape == (case.table.shape[1] * 4, 2, 8)
            np.testing.assert_allclose(np.asarray(tokens[:kv_len], np.float32), stored, rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_ids_that_are_no_page_read_the_null_page(kv_dtype):
    case = make_case([(1, 9)], page_size=4, kv_dtype=kv_dtype)
    num_pages = len(case.pool)
    ids = jnp.array([-1, 0, num_pages, num_pages + 1, 2**31 - 1, -(2**31)], jnp.int32)
    for tokens in read_pages(write(case), ids, num_kv_heads=1, head_dim=8):
        assert not np.asarray(tokens).any()


# (kv heads, head dim, dtype): per row of a token, the vectors that share its words.
DRAWN = {
    (4, 128, "bfloat16"): ["K0 K1", "V0 V1", "K2 K3", "V2 V3"],
    (2, 256, "bfloat16"): ["K0 K1", "K0' K1'", "V0 V1", "V0' V1'"],
    (1, 256, "bfloat16"): ["K0 V0", "K0' V0'"],
    (3, 128, "bfloat16"): ["K0 V0", "K1 V1", "K2 V2"],
    (1, 256, "float32"): ["K0", "K0'", "V0", "V0'"],
    (4, 128, "int8"): ["K0 K1 K2 K3", "V0 V1 V2 V3"],
    (2, 128, "int8"): ["K0 V0 K1 V1"],
    (1, 256, "int8"): ["K0 K0' V0 V0'"],
    (1, 128, "int8"): ["K0 V0 0 0"],
    (2, 64, "bfloat16"): ["K0+V0 K1+V1"],
    (1, 64, "bfloat16"): ["K0+V0 0"],
}


@pytest.mark.parametrize("geometry", DRAWN, ids=str)
def test_where_every_vector_lies(geometry):
    """As the file's head draws it; `K1'` is the second 128 elements of head 1."""
    heads, head_dim, dtype = geometry
    made = KVLayout(num_kv_heads=heads, head_dim=head_dim, page_size=8, dtype=dtype)
    names = np.full((1, heads, made.lane_tiles * 128), 0)
    key, value = (names + 10 * (1 + np.arange(heads))[:, None] for _ in range(2))
    key[..., 128:] += 1
    value = -value - (np.arange(names.shape[-1]) >= 128)
    cut = (np.asarray(each[..., :head_dim], np.int32) for each in (key, value))
    packed = np.asarray(made.pack_tokens(*map(jnp.asarray, cut)))[0]

    def name(vector):
        def one(number):
            if number == 0:
                return "0"
            return "KV"[int(number < 0)] + str(abs(number) // 10 - 1) + "'" * (abs(number) % 10)

        halves = one(vector[0]), one(vector[64])
        return halves[0] if head_dim > 64 or halves == ("0", "0") else "+".join(halves)

    assert [" ".join(map(name, row)) for row in packed] == DRAWN[geometry]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_packing_can_be_undone_and_agrees_with_place(heads, head_dim, dtype):
    made = KVLayout(num_kv_heads=heads, head_dim=head_dim, page_size=8, dtype=dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(-99, 99, (8, 2, heads, head_dim)).astype(jnp.dtype(dtype))
    scales = rng.random((8, heads, 2), np.float32)
    packed = made.pack_tokens(*(jnp.asarray(tokens[:, kind]) for kind in (0, 1)))
    pool = laid_out(tokens[None], scales.swapaxes(1, 2)[None] if made.is_quantized else None)
    np.testing.assert_array_equal(packed, page_array(pool)[0])
    for kind, undone in enumerate(made.unpack_tokens(packed)):
        np.testing.assert_array_equal(undone, tokens[:, kind])
    if made.is_quantized:
        rows = np.asarray(made.pack_scales(jnp.asarray(scales)))
        np.testing.assert_array_equal(made.unpack_scales(jnp.asarray(rows)), scales)
        for kind, head, tile in np.ndindex(2, heads, made.lane_tiles):
            phase = made.place(kind, head, tile).phase
            row = rows[:, made.scale_row(kind, head), phase]
            np.testing.assert_array_equal(row, scales[:, head, kind])


def test_a_shard_of_rows_is_a_shard_of_heads():
    """Four heads cut in two: each half of the rows is the layout of two heads."""
    whole, half = (
        KVLayout(num_kv_heads=heads, head_dim=256, page_size=8, dtype="bfloat16")
        for heads in (4, 2)
    )
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.random((5, 4, 256), np.float32)) for _ in "kv")
    packed = whole.pack_tokens(keys, values)
    for shard in (0, 1):
        heads, rows = slice(2 * shard, 2 * shard + 2), slice(4 * shard, 4 * shard + 4)
        np.testing.assert_array_equal(
            half.pack_tokens(keys[:, heads], values[:, heads]), packed[:, rows]
        )
