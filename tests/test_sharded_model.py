"""The model on devices that share its heads, also where there are fewer kv heads: as on one."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.devices import make_mesh, place_weights
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.models.gemma3.sharding import (
    RULES,
    abstract_weights,
    random_weights,
    shared_config,
    weight_specs,
)
from jaxattn.models.gemma3.weights import SCALE, Axis, expected_shapes, weight_table
from jaxattn.sharding import HEADS
from jaxattn.spec import KV_DTYPES
from tests import tiny_model
from tests.single_sequence import SingleSequence

# Two kv heads for eight query heads, and a vocabulary that eight devices can share.
CONFIG = replace(tiny_model.config(1), num_q_heads=8, num_kv_heads=2, vocab_size=304)
IDS = np.random.default_rng(0).integers(3, 300, 24)
PREFILL = 21


def host_weights(dtype):
    arrays = random_weights(CONFIG, jax.random.key(1), scale=0.3)
    return {
        name: np.asarray(array, jnp.dtype(dtype) if array.ndim > 1 else np.float32)
        for name, array in arrays.items()
    }


@cache
def logits(size, dtype):
    """Of a prefill in two chunks and three decodes."""
    mesh = make_mesh(tensor_parallel=size, data_parallel=1)
    model = Gemma3(shared_config(CONFIG, size), place_weights(CONFIG, host_weights(dtype), mesh))
    options = {"page_size": 3, "max_len": len(IDS), "paddings": (16,), "mesh": mesh}
    sequence = SingleSequence(model, **options)
    hidden = [sequence.prefill(IDS[:PREFILL], 16)]
    hidden += [sequence.step(IDS[[index]]) for index in range(PREFILL, len(IDS))]
    return sequence.logits(np.concatenate(hidden))


# A kv head for each device; each on two; each on four.
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (8, "float32"),
        *[
            pytest.param(size, dtype, marks=pytest.mark.slow)
            for size, dtype in ((2, "float32"), (4, "float32"), (2, "bfloat16"), (8, "bfloat16"))
        ],
    ],
)
def test_shared_heads_equal_one_device(size, dtype):
    alone = logits(1, dtype)
    error = np.abs(logits(size, dtype) - alone)
    if dtype == "float32":
        assert error.max() < 2e-4
    else:  # keys and values share words, differently on eight devices
        assert error.mean() < 0.05 * alone.std()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_device_holds_the_kv_heads_that_its_query_heads_meet(size):
    mesh = make_mesh(tensor_parallel=size, data_parallel=1)
    weights = host_weights("float32")
    placed = place_weights(CONFIG, dict(weights), mesh)
    shared = shared_config(CONFIG, size)
    assert {name: array.shape for name, array in placed.items()} == expected_shapes(shared)
    assert {name: array.sharding.spec for name, array in placed.items()} == weight_specs(shared)
    rows = CONFIG.head_dim
    ratio = CONFIG.num_q_heads // CONFIG.num_kv_heads
    for index, device in enumerate(mesh.devices[0]):
        query = index * CONFIG.num_q_heads // size  # the device's first
        head = query // ratio
        for name in ("layers.0.k", "layers.0.v"):
            own = next(each for each in placed[name].addressable_shards if each.device == device)
            assert own.data.shape == (max(2 // size, 1) * rows, CONFIG.embed_dim)
            assert np.array_equal(own.data[:rows], weights[name][head * rows : (head + 1) * rows])


def test_abstract_weights_are_what_is_placed():
    mesh = make_mesh(tensor_parallel=4, data_parallel=2)
    placed = place_weights(CONFIG, host_weights("bfloat16"), mesh)
    for name, leaf in abstract_weights(shared_config(CONFIG, 4), "bfloat16", mesh).items():
        array = placed[name]
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_random_weights_are_made_as_the_abstract_ones_say(quantize):
    mesh = make_mesh(tensor_parallel=2, data_parallel=1)
    random = partial(random_weights, CONFIG, jax.random.key(0), "bfloat16", quantize=quantize)
    made, alone = random(mesh=mesh), random()
    abstract = abstract_weights(CONFIG, "bfloat16", mesh, quantize)
    assert list(made) == list(abstract)
    for name, leaf in abstract.items():
        array = made[name]
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
        assert np.array_equal(array, alone[name])
    cut = made["layers.0.gate"].addressable_shards
    assert [each.data.shape[0] for each in cut] == [CONFIG.mlp_dim // 2] * 2


def test_random_weights_in_8_bits_are_the_same_but_for_rounding():
    whole, plain = (
        random_weights(CONFIG, jax.random.key(0), scale=0.3, quantize=each)
        for each in ("int8", None)
    )
    for name, weight in weight_table(CONFIG, "int8").items():
        if weight.quantized:
            wide = np.asarray(whole[name], np.float32) * np.asarray(whole[name + SCALE])[:, None]
            assert np.abs(wide).max() > 0.5
            most = 127 / 32 * 0.3
            error = np.abs(wide - np.clip(plain[name], -most, most))
            assert error.max() <= 0.5001 / 32 * 0.3
        elif not name.endswith(SCALE):
            assert np.array_equal(whole[name], plain[name])


def test_every_axis_has_a_rule():
    assert set(RULES) == set(Axis.__args__)
    assert set(RULES.values()) == {HEADS, None}


@pytest.mark.parametrize(
    ("model", "size", "heads"),
    [
        *[("gemma-3-1b", size, size) for size in (1, 2, 4)],
        ("gemma-3-4b", 2, 4),
        ("gemma-3-4b", 8, 8),
        ("gemma-3-12b", 8, 8),
        ("gemma-3-27b", 8, 16),
        ("gemma-3-27b", 32, 32),
    ],
)
def test_kv_heads_that_are_stored(model, size, heads):
    shared = shared_config(CONFIGS[model], size)
    assert shared == replace(CONFIGS[model], num_kv_heads=heads)
    assert shared_config(shared, size) == shared
    for dtype in set(KV_DTYPES) - {"float16"}:
        layer_specs(shared, page_size=32, kv_dtype=dtype, shards=size)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (
            "gemma-3-1b",
            8,
            "4 query heads cannot be shared by 8 devices; 1, 2, 4 could: use tensor_parallel=4 "
            "with data_parallel=2",
        ),
        ("gemma-3-4b", 3, "8 query heads cannot be shared by 3 devices; 1, 2 could: use tensor"),
        ("gemma-3-27b", 64, "32 query heads cannot .* 1, 2, 4, 8, 16, 32 could: use tensor_par"),
    ],
)
def test_devices_that_the_heads_are_too_few_for(model, size, message):
    with pytest.raises(ValueError, match=message):
        shared_config(CONFIGS[model], size)


def test_kv_heads_that_no_repetition_spreads():
    config = replace(CONFIG, num_q_heads=12, num_kv_heads=4)
    with pytest.raises(ValueError, match="4 kv heads cannot be shared by 6 devices"):
        shared_config(replace(config, vocab_size=300), 6)
