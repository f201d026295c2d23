"""The cases of `jaxattn.testing` for every row: interpreters, parameters, pytest marks."""

from functools import wraps
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxattn import Target, ragged_paged_attention
from jaxattn.kernels.pallas import gpu, tpu
from jaxattn.kernels.pallas.gpu_shape import GpuTiles
from jaxattn.kernels.pallas.tiles import DecodeTiles, Tiles
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillTiles
from jaxattn.registry import CAPABILITIES
from jaxattn.testing.cases import NO_PAGE as NO_PAGE
from jaxattn.testing.cases import SCALE as SCALE
from jaxattn.testing.cases import Case as Case
from jaxattn.testing.cases import as_stored as as_stored
from jaxattn.testing.cases import bits as bits
from jaxattn.testing.cases import expected as expected
from jaxattn.testing.cases import expected_pool as expected_pool
from jaxattn.testing.cases import laid_out as laid_out
from jaxattn.testing.cases import live_only as live_only
from jaxattn.testing.cases import make_case as make_case
from jaxattn.testing.cases import poisoned as poisoned
from jaxattn.testing.cases import readable as readable
from jaxattn.testing.cases import tolerance as tolerance
from jaxattn.testing.cases import with_images as with_images
from jaxattn.testing.cases import written as written
from jaxattn.testing.conformance import dtypes_of as dtypes_of
from jaxattn.testing.conformance import page_size_of as page_size_of
from jaxattn.testing.conformance import tolerance_of as tolerance_of

STATIC = (
    "sm_scale",
    "sliding_window",
    "soft_cap",
    "image_rule",
    "causal",
    "update_kv_cache",
    "backend",
    "target",
    "interpret",
    "tiles",
)
call = jax.jit(ragged_paged_attention, static_argnames=STATIC)
# An interpreted kernel runs for half a second and compiles for four: three without optimisation.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}
call_interpreted = jax.jit(
    ragged_paged_attention, static_argnames=STATIC, compiler_options=UNOPTIMIZED
)


def runs_here(row):
    """Whether this process's device is one of the row's own."""
    return row.platforms is None or Target.current().platform in row.platforms


def usable_rows():
    """A pytest parameter for each row that has a kernel.

    A row without its device runs in its interpreter, see `interpreted`, or else is skipped.
    """
    return [
        pytest.param(
            row,
            id=row.backend,
            marks=pytest.mark.skipif(
                not (runs_here(row) or row.interpreter),
                reason=f"{row.backend} runs on {row.platforms}",
            ),
        )
        for row in CAPABILITIES.values()
    ]


def cells(generate):
    """Parameters from what `generate(row)` yields for each usable row: a name, values, `slow`.

    What is slow is so in an interpreter, and left out there by default.
    """
    return [
        pytest.param(
            param.values[0],
            *rest,
            id=f"{param.id}-{name}",
            marks=[*param.marks, *[pytest.mark.slow] * (slow and not runs_here(param.values[0]))],
        )
        for param in usable_rows()
        for name, *rest, slow in generate(param.values[0])
    ]


def choices(values, on_gpu):
    """A generator for `cells`: all values; on a GPU, whose interpreter is the slowest, only those
    of `on_gpu` by default."""

    def each(row):
        for value in values:
            yield str(value), value, row.backend == "pallas_gpu" and value not in on_gpu

    return each


def interpreted(backend, page_size, kv_dtype="float32", mode="eager"):
    """Options that run a Pallas backend on a CPU; none for a backend that is at home here.

    Memory starts as NaN. Tiles are as small as they may be, so that every buffer is used again
    and again. `mode` is when a TPU's copies happen: "eager" (with clocks long enough to tell
    races), or "on_wait" (which leaves out those that are never awaited).
    """
    if runs_here(CAPABILITIES[backend]):
        return {}
    if backend == "pallas_gpu":
        return {"interpret": plgpu.InterpretGPUParams(detect_races=True), "tiles": GPU_TILES}
    params = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=mode,
        vector_clock_size=1024,
        uninitialized_memory="nan",
    )
    tokens = lcm(page_size, 32 * jnp.dtype(kv_dtype).itemsize)
    tiles = Tiles(
        decode=DecodeTiles(tile_tokens=tokens, slots=3, block_seqs=2),
        prefill=PrefillTiles(block_q=8, blocks=2, block_kv=16),
    )
    return {"interpret": params, "tiles": tiles}


GPU_TILES = GpuTiles(blocks=3, tile_tokens=64, stages=2)
# For long sequences.
LARGE_TILES = {
    "pallas_tpu": Tiles(
        decode=DecodeTiles(tile_tokens=128, slots=3, block_seqs=2),
        prefill=PrefillTiles(block_q=64, blocks=2, block_kv=128),
    ),
    "pallas_gpu": GpuTiles(blocks=5, tile_tokens=128, stages=2),
}


def a_few(values, count):
    """About `count` of many values, the ends included."""
    values = list(values)
    if len(values) <= count:
        return values
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]


def everything(values, count):
    """All values."""
    return list(values)


def takes(row):
    """(name, how to take values of a long list, slow): an interpreter takes a few by default."""
    if runs_here(row):
        return [("", everything, False)]
    return [("", a_few, False), ("all ", everything, True)]


def sees(query, key, *, window, causal=True, span=(0, 0), rule="clamp"):
    """The definition, for one query and one key position. `span`: the query's own image."""
    in_window = window is None or (query - window < key and (causal or key < query + window))
    in_past = key <= query or not causal
    in_image = span[0] <= key < span[1]
    if rule == "extend":
        return (in_window and in_past) or in_image
    return in_window and (in_past or in_image)


def fresh_call():
    """`call_interpreted` without anything traced before: for kernels with parts replaced."""

    @wraps(ragged_paged_attention)
    def function(*arrays, **options):
        with pytest.MonkeyPatch.context() as patch:  # the launchers keep what they traced
            for module in (tpu, gpu):
                original = module.ragged_paged_attention.__wrapped__
                patch.setattr(module, "ragged_paged_attention", original)
            return ragged_paged_attention(*arrays, **options)

    return jax.jit(function, static_argnames=STATIC, compiler_options=UNOPTIMIZED)


def run(case, backend, *, sm_scale=SCALE, pages=None, mode="eager", jitted=None, **options):
    """(outputs, pages) as numpy; `pages` instead of the case's. `mode`: see `interpreted`."""
    options = interpreted(backend, case.page_size, case.pool.dtype, mode) | options
    jitted = jitted or (call_interpreted if options.get("interpret") else call)
    try:
        out, pages = jitted(
            *map(jnp.asarray, (case.queries, case.keys, case.values)),
            case.pages() if pages is None else pages,
            *map(jnp.asarray, (case.kv_lens, case.table, case.cu_q_lens, case.distribution)),
            sm_scale=sm_scale,
            first_page=None if case.first_page is None else jnp.asarray(case.first_page),
            image_spans=None if case.image_spans is None else jnp.asarray(case.image_spans),
            backend=backend,
            **options,
        )
        return np.asarray(out), jax.tree.map(np.asarray, pages)
    except Exception:  # of the interpreter: it keeps its memory, to be looked at
        pltpu.reset_tpu_interpret_mode_state()
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
