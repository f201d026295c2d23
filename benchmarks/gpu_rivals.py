"""Other attention on the same GPU and the same work, each where it can be imported.

A rival takes a row and a work and returns seconds of one call, or raises. It is made to run on
bfloat16 keys and values of its own, in its own layout. Those that know no pages get dense keys.
"""

import importlib
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.clock import REPEATS, chained, timed
from benchmarks.gpu_batches import Work
from benchmarks.gpu_shapes import Row

STEPS = 10
PAGE_SIZE = 16
TORCH_PAGE_SIZE = 256  # the least that FlashAttention takes


class NotOfferedError(Exception):
    """The rival has no such attention."""


def _only(offered: bool, what: str) -> None:
    if not offered:
        raise NotOfferedError(what)


def _equal(work: Work) -> tuple[int, int, int]:
    """Sequences, new tokens of each and their length."""
    _only(len(set(work.lengths)) == 1, "sequences of several lengths")
    return len(work.lengths), *work.lengths[0]


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def jax_paged(row: Row, work: Work) -> float:
    """`jax.experimental.pallas.ops.gpu.paged_attention`."""
    _only(work.decode, "prefill")
    _only(row.sliding_window is None, "a window")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    seqs, _, length = _equal(work)
    columns = -(-length // PAGE_SIZE)
    pages = _normal(row.num_kv_heads, seqs * columns, PAGE_SIZE, row.head_dim)
    table = jax.random.permutation(jax.random.key(1), seqs * columns).reshape(seqs, columns)
    lengths = jnp.full(seqs, length, jnp.int32)
    queries = _normal(seqs, row.num_q_heads, row.head_dim)
    run = chained(lambda *a: paged_attention(*a).astype(jnp.bfloat16), STEPS)
    return timed(lambda state: run(state, pages, pages, table, lengths), queries, STEPS)[0]


def _dense(row: Row, work: Work, call: Callable) -> float:
    """`call(queries, keys, values, lengths)` of `[seqs, tokens, heads, head_dim]`."""
    seqs, q_len, length = _equal(work)
    queries = _normal(seqs, q_len, row.num_q_heads, row.head_dim)
    keys = _normal(seqs, length, row.num_kv_heads, row.head_dim)
    run = chained(call, STEPS)
    return timed(lambda state: run(state, keys, keys), queries, STEPS)[0]


def cudnn(row: Row, work: Work) -> float:
    """`jax.nn.dot_product_attention` by cuDNN."""
    _, q_len, length = _equal(work)
    _only(q_len in (1, length), "a chunk behind others")
    window = (row.sliding_window - 1, 0) if row.sliding_window else None
    _only(not (work.decode and window), "one query with a window")

    def call(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            scale=row.sm_scale,
            is_causal=not work.decode,
            local_window_size=window,
            implementation="cudnn",
        )

    return _dense(row, work, call)


def tokamax(row: Row, work: Work) -> float:
    """`tokamax.dot_product_attention`."""
    module = importlib.import_module("tokamax")
    _, q_len, length = _equal(work)
    _only(q_len in (1, length), "a chunk behind others")
    _only(not (work.decode and row.sliding_window), "one query with a window")
    window = (row.sliding_window - 1, 0) if row.sliding_window else None

    def call(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return module.dot_product_attention(
            queries,
            keys,
            values,
            scale=row.sm_scale,
            is_causal=not work.decode,
            local_window_size=window,
        )

    return _dense(row, work, call)


def _torch_seconds(call: Callable[[], Any]) -> float:
    torch = importlib.import_module("torch")
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times) / STEPS


def _torch_normal(*shape: int) -> Any:
    torch = importlib.import_module("torch")
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def torch_sdpa(row: Row, work: Work) -> float:
    """PyTorch's `scaled_dot_product_attention`, dense."""
    torch = importlib.import_module("torch")
    _only(row.sliding_window is None, "a window without a mask")
    seqs, q_len, length = _equal(work)
    _only(q_len in (1, length), "a chunk behind others")
    queries = _torch_normal(seqs, row.num_q_heads, q_len, row.head_dim)
    keys = _torch_normal(seqs, row.num_kv_heads, length, row.head_dim)
    attention = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": not work.decode, "scale": row.sm_scale, "enable_gqa": True}
    return _torch_seconds(lambda: attention(queries, keys, keys, **options))


def flash_attention(row: Row, work: Work) -> float:
    """FlashAttention's `flash_attn_with_kvcache`, paged: version 3 if there, else 2."""
    try:
        module = importlib.import_module("flash_attn_interface")
        name = "page_table"
    except ImportError:
        module = importlib.import_module("flash_attn")
        name = "block_table"
    torch = importlib.import_module("torch")
    seqs, q_len, length = _equal(work)
    columns = -(-length // TORCH_PAGE_SIZE)
    table = torch.randperm(seqs * columns, dtype=torch.int32, device="cuda")
    pages = _torch_normal(seqs * columns, TORCH_PAGE_SIZE, row.num_kv_heads, row.head_dim)
    queries = _torch_normal(seqs, q_len, row.num_q_heads, row.head_dim)
    options = {
        "cache_seqlens": torch.full((seqs,), length, dtype=torch.int32, device="cuda"),
        name: table.reshape(seqs, columns),
        "softmax_scale": row.sm_scale,
        "causal": True,
        "window_size": (row.sliding_window - 1, 0) if row.sliding_window else (-1, -1),
    }
    return _torch_seconds(lambda: module.flash_attn_with_kvcache(queries, pages, pages, **options))


def flashinfer(row: Row, work: Work) -> float:
    """FlashInfer's paged wrappers; their plan is made once and not timed."""
    module = importlib.import_module("flashinfer")
    torch = importlib.import_module("torch")
    seqs, q_len, length = _equal(work)
    columns = -(-length // PAGE_SIZE)
    workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    pages = _torch_normal(seqs * columns, 2, PAGE_SIZE, row.num_kv_heads, row.head_dim)
    offsets = torch.arange(seqs + 1, dtype=torch.int32, device="cuda")
    ids = torch.randperm(seqs * columns, dtype=torch.int32, device="cuda")
    last = torch.full((seqs,), length - (columns - 1) * PAGE_SIZE, dtype=torch.int32).cuda()
    heads = row.num_q_heads, row.num_kv_heads, row.head_dim, PAGE_SIZE
    options = {
        "window_left": row.sliding_window - 1 if row.sliding_window else -1,
        "sm_scale": row.sm_scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }
    if work.decode:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=row.num_q_heads // row.num_kv_heads > 1
        )
        wrapper.plan(offsets * columns, ids, last, *heads, **options)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        q_offsets = offsets * q_len
        wrapper.plan(q_offsets, offsets * columns, ids, last, *heads, causal=True, **options)
    queries = _torch_normal(seqs * q_len, row.num_q_heads, row.head_dim)
    return _torch_seconds(lambda: wrapper.run(queries, pages))


RIVALS: dict[str, Callable[[Row, Work], float]] = {
    "jax paged_attention": jax_paged,
    "jax.nn, cuDNN": cudnn,
    "tokamax": tokamax,
    "FlashAttention": flash_attention,
    "FlashInfer": flashinfer,
    "torch SDPA": torch_sdpa,
}


def measured(name: str, row: Row, work: Work) -> float | str:
    """Seconds, or in a few words why there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return RIVALS[name](row, work)
    except NotOfferedError as error:
        return f"not offered: {error}"
    except ImportError as error:
        return f"not installed: {error.name}"
    except Exception as error:  # whatever another's code raises is one line of the table
        words = " ".join(str(error).split())[:100]
        return f"{type(error).__name__}: {words}"
