"""`project` against float64 on the CPU, where a single row takes a path of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.models.gemma3.linear import Linear, _lanes, project

# (out, in); the last one is a product of two rows on CPU
SHAPES = [(96, 640), (640, 2048), (33, 97), (5, 41 * 17), (8192, 64), (4, 7)]


def operands(rows, shape, dtype):
    """Random numbers of a dtype, as jax has them and exactly in float64."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, shape[1]), np.float32), dtype)
    weight = jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    return x, weight, np.asarray(x, np.float64), np.asarray(weight, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_accumulate_in_float32(shape, rows, dtype):
    x, weight, wide_x, wide_weight = operands(rows, shape, dtype)
    out = jax.jit(project, static_argnums=2)(x, weight, jnp.dtype("float32"))
    assert out.shape == (rows, shape[0])
    assert out.dtype == jnp.float32
    exact = wide_x @ wide_weight.T
    bound = np.abs(wide_x) @ np.abs(wide_weight).T  # of what rounding can do, per unit of epsilon
    assert (np.abs(out - exact) <= 8 * np.finfo(np.float32).eps * bound).all()


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_results_are_rounded_once(shape, rows):
    x, weight, wide_x, wide_weight = operands(rows, shape, "bfloat16")
    out = jax.jit(Linear.__call__)(Linear(weight), x)
    assert out.dtype == jnp.bfloat16
    exact = wide_x @ wide_weight.T
    half_step = np.abs(exact) * 2.0**-8
    bound = np.abs(wide_x) @ np.abs(wide_weight).T
    error = np.abs(np.asarray(out, np.float64) - exact)
    assert (error <= half_step + 1e-5 * bound).all()


def test_a_row_is_the_same_alone_and_in_company():
    """Up to the order of a float32 sum; the tall matrix is the tied head's shape, cut short."""
    x, weight, *_ = operands(7, (8192, 640), "bfloat16")
    run = jax.jit(project, static_argnums=2)
    alone = jnp.concatenate([run(x[i : i + 1], weight, jnp.dtype("float32")) for i in range(7)])
    np.testing.assert_allclose(alone, run(x, weight, jnp.dtype("float32")), atol=1e-4)


@pytest.mark.parametrize("shape", [(96, 640), (8192, 640), (640, 2048)])
def test_no_copy_of_the_weight_for_a_single_row(shape):
    """Converted to float32 it would take twice its bytes."""
    x, weight, *_ = operands(1, shape, "bfloat16")
    compiled = jax.jit(project, static_argnums=2).lower(x, weight, jnp.dtype("float32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes / 4


@pytest.mark.parametrize(
    ("outputs", "size", "lanes"),
    [
        (2048, 640, 40),  # at most 16 terms
        (640, 1024, 64),
        (640, 2048, 128),
        (262_144, 640, 16),  # 40 terms, or the partial sums would take too much memory
        (262_144, 1152, None),  # 36 lanes would: a product of two rows instead
        (1152, 6912, 432),
        (33, 97, 97),
        (5, 41 * 17, 697),
        (4, 8, 8),
        (4, 7, None),
    ],
)
def test_lanes(outputs, size, lanes):
    assert _lanes(outputs, size) == lanes
