"""The two spellings of a load: what only the compiler runs gives the rows that the tests run on.

The interpreter has no `Ref.bitcast` and no `Ref.reshape`, so that the chip's spelling is run here
from the point on where a tile is a matrix of words: its strided load, and the bitcast of a value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxattn.kernels.pallas.scalars import ceil_quotient, quotient, remainder
from jaxattn.kernels.pallas.words import as_rows, load_words

TOKENS, ROWS = 16, 3


def interpreted(kernel, out_shape, *arrays):
    call = pl.pallas_call(kernel, out_shape=out_shape, interpret=pltpu.InterpretParams())
    return np.asarray(call(*arrays))


@pytest.mark.parametrize("row", range(ROWS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_both_spellings_give_the_same_rows(dtype, row):
    dtype = jnp.dtype(dtype)
    pack = 4 // dtype.itemsize
    numbers = np.random.default_rng(0).integers(-99, 99, (TOKENS, ROWS, pack, 128))
    tile = numbers.astype(dtype)
    # The words of a tile as memory holds them: the first of `pack` vectors in the lowest bits.
    words = np.ascontiguousarray(tile.swapaxes(2, 3)).view(np.uint32).reshape(-1, 128)
    out_shape = jax.ShapeDtypeStruct((TOKENS * pack, 128), dtype)

    def tested(tile_ref, out_ref):
        loaded = load_words(tile_ref, row, interpret=True)
        out_ref[...] = as_rows(loaded, dtype, interpret=True)

    def compiled(words_ref, out_ref):
        loaded = words_ref[pl.ds(row, TOKENS, stride=ROWS), :]
        out_ref[...] = as_rows(loaded, dtype, interpret=False)

    want = tile[:, row].reshape(TOKENS * pack, 128)
    np.testing.assert_array_equal(interpreted(tested, out_shape, jnp.asarray(tile)), want)
    np.testing.assert_array_equal(interpreted(compiled, out_shape, jnp.asarray(words)), want)


@pytest.mark.parametrize("divisor", [1, 2, 8, 3, 40])
def test_division_of_what_is_not_negative(divisor):
    value = jnp.arange(300, dtype=jnp.int32)
    np.testing.assert_array_equal(quotient(value, divisor), np.arange(300) // divisor)
    np.testing.assert_array_equal(remainder(value, divisor), np.arange(300) % divisor)
    np.testing.assert_array_equal(ceil_quotient(value, divisor), -(-np.arange(300) // divisor))
