"""The TPU kernels lower for TPUs that are not here, with nothing but JAX: Gemma 3's layers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxattn import Target, ragged_paged_attention
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.model import layer_specs
from jaxattn.sharding import over_heads, pages_sharding

MODELS = ("gemma-3-1b", "gemma-3-4b", "gemma-3-27b")
STEPS = {"decode": (16, 16), "mixed": (512, 16)}  # tokens, sequences
PAGE_SIZE, PAGES_PER_SEQ = 32, 256


def layer_of(model, windowed):
    """The first layer with a window, or without one."""
    layers = layer_specs(CONFIGS[model], page_size=PAGE_SIZE, kv_dtype="bfloat16")
    return next(each for each in layers if (each.mask.sliding_window is not None) == windowed)


def arguments(layer, tokens, seqs):
    """Shapes of a call's arrays."""

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def new(heads):
        return jax.ShapeDtypeStruct((tokens, heads, layer.store.head_dim), jnp.bfloat16)

    pages = layer.store.pages(1 + seqs * PAGES_PER_SEQ)
    kv_heads = layer.store.num_kv_heads
    lengths = integers(seqs), integers(seqs, PAGES_PER_SEQ), integers(seqs + 1), integers(3)
    return new(layer.num_q_heads), new(kv_heads), new(kv_heads), pages, *lengths


def options(layer, chip):
    return {
        "sm_scale": layer.scale,
        "sliding_window": layer.mask.sliding_window,
        "backend": "pallas_tpu",
        "target": Target.tpu(chip),
    }


def lowered(function, arrays):
    """The program for TPU, with its pages donated."""
    step = jax.jit(function, donate_argnums=3)
    return jax.export.export(step, platforms=["tpu"])(*arrays).mlir_module()


def check(program, windowed):
    """Both kernels are there by name, and each hands its pages on in place."""
    assert program.count("@tpu_custom_call") == 2
    names = {"jaxattn_decode_window", "jaxattn_prefill"} if windowed else {"jaxattn_decode"}
    assert all(f'"{name}"' in program for name in names)
    assert program.count("output_operand_alias<") == 3  # the pages twice, the output once


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("windowed", [True, False], ids=["windowed", "global"])
@pytest.mark.parametrize("model", MODELS)
def test_layers(model, windowed, step):
    layer = layer_of(model, windowed)
    call = partial(ragged_paged_attention, **options(layer, "v6e"))
    check(lowered(call, arguments(layer, *STEPS[step])), windowed)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "tpu7x"])
def test_every_other_chip(chip):
    layer = layer_of("gemma-3-4b", windowed=True)
    call = partial(ragged_paged_attention, **options(layer, chip))
    check(lowered(call, arguments(layer, *STEPS["mixed"])), windowed=True)


@pytest.mark.parametrize("windowed", [True, False], ids=["windowed", "global"])
@pytest.mark.parametrize(
    ("model", "kv_heads", "queries"),
    [("gemma-3-27b", 16, "512x8x128xbf16"), ("gemma-3-1b", 4, "512x1x256xbf16")],
    ids=["four heads a device", "one head, repeated"],
)
def test_over_kv_heads_of_four_devices(model, kv_heads, queries, windowed):
    """`shard_map` checks what varies over devices."""
    layer = layer_of(model, windowed)
    layer = replace(layer, store=replace(layer.store, num_kv_heads=kv_heads, shards=4))
    mesh = AbstractMesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    heads, whole = PartitionSpec(None, "heads"), PartitionSpec()
    specs = (heads, heads, heads, pages_sharding(layer.store.pages(2), "heads"), *[whole] * 4)
    arrays = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec))
        for each, spec in zip(arguments(layer, *STEPS["mixed"]), specs, strict=True)
    ]
    absent = dict.fromkeys(("sinks", "image_spans", "first_page"))
    call = partial(
        over_heads(ragged_paged_attention, "heads", 4), **absent, **options(layer, "v6e")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        program = lowered(call, arrays)
    check(program, windowed)
    assert queries in program  # a quarter of the query heads
    assert "all_gather" not in program and "all_reduce" not in program
