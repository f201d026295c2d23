"""The public attention call: validate, ask the registry, dispatch. All of it while tracing."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState
from jaxattn.kernels import layout, reference, xla
from jaxattn.kernels.layout import KVPages, QuantizedPages
from jaxattn.kernels.pallas.gpu_shape import GpuTiles, multiprocessors
from jaxattn.kernels.pallas.tiles import Tiles, chip_of
from jaxattn.registry import Backend, Need, Target, check_backend_name, select
from jaxattn.sharding import over_heads
from jaxattn.spec import (
    KV_DTYPES,
    ImageRule,
    LayerSpec,
    check_positive_int,
    check_sliding_window,
    check_soft_cap,
)

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
    from jax.experimental.pallas.tpu import InterpretParams


def _pallas_tpu(*arrays: Any, target: Target, tiles: Tiles | None, **options: Any) -> Any:
    from jaxattn.kernels.pallas import tpu  # Pallas takes a second to import

    chip = chip_of(target.device_kind)
    assert chip is not None, "the registry knows the chip"
    return tpu.ragged_paged_attention(*arrays, chip=chip, tiles=tiles or Tiles(), **options)


def _pallas_gpu(
    *arrays: Any, target: Target, tiles: GpuTiles | None, interpret: Any, **options: Any
) -> Any:
    from jaxattn.kernels.pallas import gpu

    if tiles is None:
        tiles = GpuTiles()
    if tiles.blocks is None:
        blocks = INTERPRETED_BLOCKS if interpret else multiprocessors(target.device_kind)
        tiles = replace(tiles, blocks=blocks)
    return gpu.ragged_paged_attention(*arrays, tiles=tiles, interpret=interpret, **options)


def _interpreter(asked: Any, backend: str) -> "InterpretParams | InterpretGPUParams":
    """The interpreter's parameters: its own for each kind of device."""
    if backend == "pallas_gpu":
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams as Params

        _check_threads()
    else:
        from jax.experimental.pallas.tpu import InterpretParams as Params  # type: ignore[assignment]
    if asked is True:
        return Params()
    if not isinstance(asked, Params):
        raise TypeError(
            f"interpret={asked!r} with {backend=}: expected True, False or {Params.__name__}"
        )
    return asked


def _check_threads() -> None:
    """Raise where the warpgroups of a block would wait for each other for ever.

    Each needs a thread of its own, and the CPU client has as many as processors or devices.
    """
    threads = max(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        int(os.environ.get("NPROC", 0)),
        len(jax.devices("cpu")),
    )
    if threads < WARPGROUPS:
        raise RuntimeError(
            f"interpret= with backend='pallas_gpu' needs {WARPGROUPS} threads, here are {threads}; "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=4 before JAX starts"
        )


WARPGROUPS = 3  # of a thread block
INTERPRETED_BLOCKS = 4  # thread blocks: as many as a GPU has would take minutes
_PALLAS: dict[str, Callable] = {"pallas_tpu": _pallas_tpu, "pallas_gpu": _pallas_gpu}
_KERNELS: dict[str, Callable] = {
    "xla": xla.ragged_paged_attention,
    "reference": reference.ragged_paged_attention,
}


def kv_pages_shape(
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    backend: str | Backend | None = None,
) -> jax.ShapeDtypeStruct | QuantizedPages:
    """Shape and dtype of one layer's KV pages, a pytree of `jax.ShapeDtypeStruct`.

    `num_pages` includes the null page 0. All backends share one layout, so layers of a model may
    use different ones; `backend` is only checked. int8 and float8 give values and scales.
    """
    for name, value in (
        ("num_pages", num_pages),
        ("page_size", page_size),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        check_positive_int(name, value)
    if dtype not in KV_DTYPES:
        raise ValueError(f"{dtype=}: a cache stores one of {', '.join(KV_DTYPES)}")
    check_backend_name(backend)
    return layout.KVLayout(
        page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    ).pages(num_pages)


def ragged_paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: KVPages,
    kv_lens: Int32[Array, "seqs"],
    page_indices: Int32[Array, "seqs pages_per_seq"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "q_heads"] | None = None,
    image_spans: Int32[Array, "tokens 2"] | None = None,
    image_rule: ImageRule = "clamp",
    causal: bool = True,
    first_page: Int32[Array, "seqs"] | None = None,
    update_kv_cache: bool = True,
    backend: str | Backend | None = None,
    target: Target | None = None,
    interpret: "InterpretParams | InterpretGPUParams | bool" = False,
    tiles: Tiles | GpuTiles | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """Write new keys and values to their pages, and attend. One call for mixed batches.

    The flat tokens are the new tokens of all sequences, one sequence after the other: sequence i
    owns rows `cu_q_lens[i] : cu_q_lens[i + 1]`, and its last new token is at absolute position
    `kv_lens[i] - 1`. Donate `kv_pages` to your jit, so that they are updated in place.

    Args:
        queries: of the new tokens, after rope and norms.
        keys: the same.
        values: of the new tokens.
        kv_pages: this layer's pages, see `kv_pages_shape`.
        kv_lens: length of each sequence, *including* its new tokens; no more than its table holds.
        page_indices: page table; column c of a sequence is its page `first_page + c`. Tokens
            whose entry is no page (0, negative, beyond the pool) are not written.
        cu_q_lens: cumulative new-token counts, `cu_q_lens[0] == 0`.
        distribution: cumulative counts `(decode, prefill, total)` of sequences: the first
            `decode` have exactly one new token each (another number gives wrong results), sequences
            from `total` on are padding.
        sm_scale: multiplies q k.
        sliding_window: static W; the query at q sees keys k with `q - W < k <= q`. None: all.
        soft_cap: static c; scores become `c * tanh(score / c)`.
        sinks: one logit per query head, added to the softmax's denominator.
        image_spans: per token, absolute `(start, end)` of the image it belongs to, which contains
            it; empty for text. An image's tokens see each other in both directions; see
            `kernels/mask.py` for `image_rule` ("clamp" or "extend"; "none" ignores the spans and
            refuses them).
        causal: False lets every query see later keys too (within `|q - k| < W`).
        first_page: page index that column 0 of the table stands for, so that a window group's
            table may hold live pages only. Default 0.
        update_kv_cache: False for a layer that reads another layer's pages and writes nothing.
        backend: a name, or a `Backend` of one's own: that one runs, or raises. None: the first
            that supports the call.
        target: the device to compile for; default: that of the abstract mesh in use if it names
            one, else this process's default device.
        interpret: run the Pallas backend that is named in its interpreter, on any machine, as it
            would run on `target` (default: a TPU v6e, or an H100). True, or the parameters of
            `jax.experimental.pallas.tpu.InterpretParams` or of
            `jax.experimental.pallas.mosaic_gpu.InterpretGPUParams`. Slow: for tests.
        tiles: sizes in place of the kernels' own: `Tiles` for a TPU, `GpuTiles` for a GPU.

    Returns:
        Output `[tokens, q_heads, head_dim]` in the queries' dtype (zeros for padding), and the
        updated pages. Recompiles when a shape or a static value changes, never with lengths.
        For inference: only `backend="reference"` can be differentiated.

    Raises:
        UnsupportedAttentionError: no candidate backend supports the call (all reasons listed).
        TypeError, ValueError: an argument is wrong in itself. All raised while tracing.
    """
    _check_arrays(
        queries,
        keys,
        values,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        sinks,
        image_spans,
        first_page,
    )
    check_sliding_window(sliding_window)
    check_soft_cap(soft_cap)
    if not isinstance(sm_scale, float | int) or isinstance(sm_scale, bool):
        raise TypeError(f"{sm_scale=}: expected a Python float; the scale is static")
    for name, flag in (("causal", causal), ("update_kv_cache", update_kv_cache)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: expected True or False")
    if target is not None and not isinstance(target, Target):
        raise TypeError(f"{target=}: expected a jaxattn.Target, for example Target.tpu('v6e')")
    if tiles is not None and not isinstance(tiles, Tiles | GpuTiles):
        raise TypeError(
            f"{tiles=}: expected jaxattn.Tiles(decode=..., prefill=...), or for a GPU GpuTiles(...)"
        )
    if image_rule not in get_args(ImageRule):
        raise ValueError(f"{image_rule=}: use one of {get_args(ImageRule)}")
    if image_spans is not None and image_rule == "none":
        raise ValueError(
            "image_spans were given to a layer with image_rule='none', which would ignore them; "
            "use image_rule='clamp' or 'extend', or pass no spans"
        )
    if interpret and (isinstance(backend, Backend) or backend not in _PALLAS):
        raise ValueError(f"interpret= with {backend=}: name one of {', '.join(_PALLAS)}")
    if interpret is not False:
        assert isinstance(backend, str)
        interpret = _interpreter(interpret, backend)
    if target is None:
        target = Target.current()
        if interpret:
            target = Target.gpu("h100") if backend == "pallas_gpu" else Target.tpu("v6e")
    need = Need(
        target=target,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        image_rule="none" if image_spans is None else image_rule,
        causal=causal,
        num_q_heads=queries.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=queries.shape[2],
        page_size=layout.page_array(kv_pages).shape[1],
        query_dtype=queries.dtype.name,
        kv_dtype=layout.page_array(kv_pages).dtype.name,
        first_page=first_page is not None,
        update_kv_cache=update_kv_cache,
        table_entries=page_indices.shape[0] * page_indices.shape[1],
        interpret=bool(interpret),
        tiles=tiles,
    )
    chosen = select(need, backend)
    kernel = backend.kernel if isinstance(backend, Backend) else _KERNELS.get(chosen)
    if kernel is None:
        kernel = partial(_PALLAS[chosen], target=target, tiles=tiles, interpret=interpret or None)
    arrays = queries, keys, values, kv_pages, kv_lens, page_indices, cu_q_lens, distribution
    optional = {"sinks": sinks, "image_spans": image_spans, "first_page": first_page}
    return kernel(
        *jax.tree.map(jnp.asarray, arrays),  # from numpy too
        **jax.tree.map(jnp.asarray, optional),
        sm_scale=float(sm_scale),
        sliding_window=sliding_window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        image_rule=image_rule,
        causal=causal,
        update_kv_cache=update_kv_cache,
    )


def attend(
    layer: LayerSpec,
    queries: Float[Array, "tokens q_heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    cache: CacheState,
    *,
    plan: CachePlan,
    batch: RaggedBatch,
    sinks: Float[Array, "q_heads"] | None = None,
    image_spans: Int32[Array, "tokens 2"] | None = None,
    backend: str | Backend | None = None,
    target: Target | None = None,
    interpret: "InterpretParams | InterpretGPUParams | bool" = False,
    tiles: Tiles | GpuTiles | None = None,
    heads_axis: str | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], CacheState]:
    """One layer's attention: the mask comes from the layer, the pages from its group.

    `heads_axis` names the axis of the mesh in use over which heads and pages are cut; the layers'
    `StoreSpec` has as many `shards` as the axis has devices.

    A layer that shares another's KV reads that layer's pages under its own mask and writes
    nothing (`keys` and `values` then only give the number of kv heads). See
    `ragged_paged_attention` for shapes and errors.
    """
    if layer.mask.sinks != (sinks is not None):
        given = "none were given" if sinks is None else "sinks were given"
        raise ValueError(f"layer {layer.name!r} has sinks={layer.mask.sinks}, but {given}")
    if queries.shape[1] != layer.num_q_heads:
        raise ValueError(
            f"layer {layer.name!r} has {layer.num_q_heads} query heads, got {queries.shape[1]}"
        )
    owner = plan.storage_of(layer.name)
    table = batch.tables[plan.group_of(layer.name)]
    attention = ragged_paged_attention
    shards = plan.groups[plan.group_of(layer.name)].store.shards
    if heads_axis is not None:
        attention = over_heads(attention, heads_axis, shards)
    elif shards > 1:
        raise ValueError(f"the pages of {layer.name!r} are of {shards} devices: name a heads_axis")
    out, pages = attention(
        queries,
        keys,
        values,
        cache.pages[owner],
        batch.kv_lens,
        table.page_indices,
        batch.cu_q_lens,
        batch.distribution,
        sm_scale=layer.scale,
        sliding_window=layer.mask.sliding_window,
        soft_cap=layer.mask.soft_cap,
        sinks=sinks,
        image_spans=None if layer.mask.image_rule == "none" else image_spans,
        image_rule=layer.mask.image_rule,
        causal=layer.mask.causal,
        first_page=table.first_page,
        update_kv_cache=owner == layer.name,
        backend=backend,
        target=target,
        interpret=interpret,
        tiles=tiles,
    )
    return out, cache.updated(owner, pages)


def _check_arrays(
    queries: Array,
    keys: Array,
    values: Array,
    kv_pages: KVPages,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    sinks: Array | None,
    image_spans: Array | None,
    first_page: Array | None,
) -> None:
    """Raise on shapes and dtypes that do not fit together; nothing is broadcast or cast."""
    needed = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "kv_pages": layout.page_array(kv_pages),
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "distribution": distribution,
    }
    for name, given in needed.items():
        if not hasattr(given, "shape") or not hasattr(given, "dtype"):
            raise TypeError(f"{name} is a {type(given).__name__}, expected an array")
    if queries.ndim != 3 or keys.ndim != 3:
        raise ValueError(
            f"queries {queries.shape} and keys {keys.shape}: expected [tokens, heads, head_dim]"
        )
    tokens, q_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} kv heads")
    if tokens == 0:
        raise ValueError("queries hold no tokens; pad a step to at least one")
    pages = layout.page_array(kv_pages)
    if pages.ndim != 5:
        raise ValueError(f"kv_pages {pages.shape}: make them by jaxattn.kv_pages_shape")
    seqs = kv_lens.shape[0] if kv_lens.ndim == 1 else -1
    if seqs == 0 or 0 in page_indices.shape or pages.shape[0] == 0:
        raise ValueError(
            f"no sequences, pages or table columns: kv_lens {kv_lens.shape}, page_indices "
            f"{page_indices.shape}, kv_pages {pages.shape}; pad a step to at least one of each"
        )
    if page_indices.ndim != 2:
        raise ValueError(f"page_indices {page_indices.shape}: expected [seqs, pages_per_seq]")
    made: Any = layout.layout_of(kv_pages, kv_heads, head_dim).pages(pages.shape[0])
    expected = [
        ("keys", keys, (tokens, kv_heads, head_dim), None),
        ("values", values, (tokens, kv_heads, head_dim), None),
        ("kv_pages", pages, layout.page_array(made).shape, None),
        ("kv_lens", kv_lens, (seqs,), "int32"),
        ("page_indices", page_indices, (seqs, page_indices.shape[1]), "int32"),
        ("cu_q_lens", cu_q_lens, (seqs + 1,), "int32"),
        ("distribution", distribution, (3,), "int32"),
        ("first_page", first_page, (seqs,), "int32"),
        ("image_spans", image_spans, (tokens, 2), "int32"),
        ("sinks", sinks, (q_heads,), None),
    ]
    if isinstance(made, QuantizedPages):
        if not isinstance(kv_pages, QuantizedPages):
            raise ValueError(
                f"kv_pages of {pages.dtype.name} need scales: make them by jaxattn.kv_pages_shape"
            )
        expected.append(("kv_pages.scales", kv_pages.scales, made.scales.shape, "float32"))
    for name, array, shape, dtype in expected:
        if array is None:
            continue
        if tuple(array.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {tuple(shape)}")
        if dtype is not None and array.dtype.name != dtype:
            raise TypeError(f"{name} has dtype {array.dtype.name}, expected {dtype}")
    if not (queries.dtype == keys.dtype == values.dtype):
        raise TypeError(
            f"queries {queries.dtype.name}, keys {keys.dtype.name} and values {values.dtype.name} "
            "differ; cast them to one dtype"
        )
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks have dtype {sinks.dtype.name}, expected a float")
