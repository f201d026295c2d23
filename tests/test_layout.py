"""The page layout: shapes, writing, reading, scales, and the null page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import kv_pages_shape
from jaxattn.kernels.layout import (
    QuantizedPages,
    is_quantized,
    page_array,
    quantize,
    read_pages,
    write_tokens,
)
from jaxattn.spec import KV_DTYPES
from tests.attention_cases import expected_pool, make_case

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
GEOMETRY = {"num_pages": 7, "page_size": 4, "num_kv_heads": 3, "head_dim": 8}


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_shapes(dtype):
    shape = kv_pages_shape(**GEOMETRY, dtype=dtype)
    leaves = jax.tree.leaves(shape)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert page_array(shape).shape == (7, 4, 2, 3, 8)
    assert page_array(shape).dtype == dtype
    assert isinstance(shape, QuantizedPages) == is_quantized(dtype) == (dtype in QUANTIZED)
    if dtype in QUANTIZED:
        assert (shape.scales.shape, shape.scales.dtype) == ((7, 4, 2, 3), jnp.float32)
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
    pool, _ = expected_pool(case)
    np.testing.assert_array_equal(np.asarray(page_array(pages)), pool)
    for sequence, (_, kv_len) in enumerate(case.lengths):
        read = read_pages(pages, jnp.asarray(case.table[sequence]))
        for tokens, stored in zip(read, case.stored[sequence], strict=True):
            assert tokens.shape == (case.table.shape[1] * 4, 2, 8)
            np.testing.assert_allclose(np.asarray(tokens[:kv_len], np.float32), stored, rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_ids_that_are_no_page_read_the_null_page(kv_dtype):
    case = make_case([(1, 9)], page_size=4, kv_dtype=kv_dtype)
    num_pages = len(case.pool)
    ids = jnp.array([-1, 0, num_pages, num_pages + 1, 2**31 - 1, -(2**31)], jnp.int32)
    for tokens in read_pages(write(case), ids):
        assert not np.asarray(tokens).any()


def test_pages_are_one_block_of_interleaved_keys_and_values():
    """The layout itself: a token's keys and values lie side by side."""
    case = make_case([(4, 4)], page_size=4, kv_heads=2)
    page = np.asarray(write(case))[case.table[0, 0]]
    np.testing.assert_array_equal(page[:, 0], case.keys)
    np.testing.assert_array_equal(page[:, 1], case.values)
