"""Every claimed cell of the GPU kernels lowers: layouts, shared memory and the verifier.

`python -m benchmarks.gpu_schedule --check` goes on from here to the assembler, in an environment
of its own.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxattn import Target, kv_pages_shape, ragged_paged_attention
from jaxattn.registry import CAPABILITIES

ROW = CAPABILITIES["pallas_gpu"]
SEQS, TOKENS, WIDTH = 4, 256, 8


def lowered(head_dim, kv_dtype, *, page_size=32, q_heads=8, kv_heads=4, sinks=False, **mask):
    spec = jax.ShapeDtypeStruct
    queries = spec((TOKENS, q_heads, head_dim), jnp.bfloat16)
    keys = spec((TOKENS, kv_heads, head_dim), jnp.bfloat16)
    pages = kv_pages_shape(
        num_pages=64,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype,
        backend="pallas_gpu",
    )
    lengths = [spec(shape, jnp.int32) for shape in ((SEQS,), (SEQS, WIDTH), (SEQS + 1,), (3,))]
    call = partial(
        ragged_paged_attention,
        sm_scale=0.1,
        backend="pallas_gpu",
        target=Target.gpu("h100"),
        **mask,
    )
    given = {"sinks": spec((q_heads,), jnp.bfloat16)} if sinks else {}
    traced = jax.jit(call).trace(queries, keys, keys, pages, *lengths, **given)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


PADDED = (80, 96, 192)  # to 128 and 256, which lower the same
ALIKE = ("float8_e5m2",)  # lowers like the other float8


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        pytest.param(
            head_dim,
            kv_dtype,
            marks=[pytest.mark.slow]
            * (kv_dtype in ALIKE or (head_dim in PADDED and kv_dtype != "bfloat16")),
        )
        for head_dim in ROW.head_dims
        for kv_dtype in ROW.kv_dtypes
    ],
)
def test_head_dims_and_dtypes(head_dim, kv_dtype):
    text = lowered(head_dim, kv_dtype)
    for name in ("jaxattn_decode", "jaxattn_prefill", "jaxattn_combine"):
        assert name in text


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_page_sizes(page_size, kv_dtype):
    lowered(128, kv_dtype, page_size=page_size)


@pytest.mark.parametrize("ratio", ROW.q_heads_per_kv_head)
def test_query_heads_per_kv_head(ratio):
    lowered(128, "bfloat16", q_heads=2 * ratio, kv_heads=2)


@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 100},
        {"sliding_window": 100, "soft_cap": 30.0, "sinks": True},
        {"causal": False},
    ],
    ids=str,
)
def test_features(features):
    lowered(256, "bfloat16", **features)
