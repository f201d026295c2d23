"""int8 weights: rows, products, whole models, and what is left alone."""

import dataclasses
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from jax.sharding import PartitionSpec

from benchmarks.tpu_aot import Case, compile_cases
from jaxattn.engine.devices import make_mesh, place_weights
from jaxattn.models.gemma3 import checkpoint, linear
from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.linear import Linear, project
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.quantize import quantize_rows
from jaxattn.models.gemma3.sharding import weight_specs
from jaxattn.models.gemma3.weights import (
    SCALE,
    expected_shapes,
    quantization_of,
    weight_table,
)
from tests import tiny_model
from tests.single_sequence import SingleSequence
from tests.tiny_checkpoints import CONFIG, gguf_tensors, random_weights, write_gguf

WEIGHTS = random_weights()
MATRICES = [name for name, array in WEIGHTS.items() if array.ndim == 2]


def quantized(weights) -> dict[str, np.ndarray]:
    """As the loader makes them."""
    result = {}
    for name, array in weights.items():
        if array.ndim == 1:
            result[name] = array
        else:
            result[name], result[name + SCALE] = quantize_rows(np.asarray(array, np.float32))
    return result


# Rows.


def test_every_row_has_a_scale_of_its_own():
    """One output a thousand times larger leaves the others as they were."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 50)).astype(np.float32)
    alone, _ = quantize_rows(values)
    values[3] *= 1000
    whole, scale = quantize_rows(values)
    np.testing.assert_array_equal(whole, alone)
    assert (whole.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (6,))
    assert (np.abs(whole).max(axis=1) == 127).all()
    error = np.abs(whole * scale[:, None] - values)
    assert (error <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e38])
def test_rows_of_extreme_size(size):
    values = np.array([[size, -size, size / 2]], np.float32)
    whole, scale = quantize_rows(values)
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    assert whole.min() >= -127
    np.testing.assert_allclose(whole * scale, values, rtol=0.01, atol=1e-43)


# Products.


@pytest.mark.parametrize("block", [linear._BLOCK, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("shape", [(96, 640), (33, 97), (4, 7), (60, 40)])
def test_products_are_exact_up_to_float32_sums(shape, rows, dtype, block, monkeypatch):
    monkeypatch.setattr(linear, "_BLOCK", block)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, shape[1]), np.float32), dtype)
    whole = rng.integers(-127, 128, shape).astype(np.int8)
    scale = rng.uniform(1e-3, 1e3, shape[0]).astype(np.float32)
    run = jax.jit(lambda *arrays: project(*arrays[:2], jnp.dtype("float32"), arrays[2]))
    out = run(x, whole, scale)
    assert out.dtype == jnp.float32
    wide_x, wide = np.asarray(x, np.float64), whole * scale.astype(np.float64)[:, None]
    bound = np.abs(wide_x) @ np.abs(wide).T
    assert (np.abs(out - wide_x @ wide.T) <= 8 * np.finfo(np.float32).eps * bound).all()
    layer = Linear(jnp.asarray(whole), jnp.asarray(scale))
    assert layer(x).dtype == x.dtype


@pytest.mark.parametrize("rows", [1, 8])
def test_no_copy_of_a_large_weight(rows):
    """Converted to bfloat16 it would take twice its bytes."""
    x = jax.ShapeDtypeStruct((rows, 640), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((32_768, 640), jnp.int8)
    scale = jax.ShapeDtypeStruct((32_768,), jnp.float32)
    run = jax.jit(lambda x, weight, scale: project(x, weight, jnp.dtype("float32"), scale))
    compiled = run.lower(x, weight, scale).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32_768 * 640 * 0.7


def product_for_tpu(target, devices, *, rows, outputs):
    """A case of `compile_cases`."""
    arrays = ((rows, 640), "bfloat16"), ((outputs, 640), "int8"), ((outputs,), "float32")
    run = jax.jit(lambda x, weight, scale: project(x, weight, jnp.dtype("float32"), scale))
    return run, [jax.ShapeDtypeStruct(*array) for array in arrays]


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_keeps_no_converted_copy_of_a_weight():
    """By libtpu's compiler: the conversion is inside of the product."""
    builder = "tests.test_gemma3_quantize:product_for_tpu"
    rows, outputs = 8, 32_768
    case = Case("product", builder, {"rows": rows, "outputs": outputs})
    (compiled,) = compile_cases("v5e", [case])
    assert not compiled.error
    assert compiled.temp_bytes < 2 * rows * outputs  # a converted weight: 1,280 * outputs


# The table.


def test_the_table_says_what_is_quantised_and_how_it_is_cut():
    plain, table = weight_table(CONFIG), weight_table(CONFIG, "int8")
    assert [name for name, weight in table.items() if weight.quantized] == MATRICES
    assert set(table) - set(plain) == {name + SCALE for name in MATRICES}
    assert all(table[name].wide for name in set(table) - set(MATRICES))
    assert quantization_of(table) == "int8"
    assert quantization_of(plain) is None
    specs = weight_specs(CONFIG, "int8")
    for name in MATRICES:
        assert specs[name + SCALE] == PartitionSpec(specs[name][0]), name
    assert specs["layers.0.gate.scale"] == PartitionSpec("heads")
    assert specs["layers.0.down.scale"] == PartitionSpec(None)


def test_the_vision_tower_is_left_alone():
    plain, table = (weight_table(CONFIGS["gemma-3-4b"], each) for each in (None, "int8"))
    tower = {name for name in plain if name.startswith(("vision.", "projector."))}
    assert len(tower) > 400
    assert {name: table[name] for name in tower} == {name: plain[name] for name in tower}
    assert not [name for name in table if name.startswith("vision.") and name.endswith(SCALE)]


# Loading.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_quantises_the_file_s_numbers_block_by_block(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 7 * 64 * 4)
    kind = GGMLQuantizationType.F32
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS), kind=kind)
    _, loaded = load_weights(path, dtype=dtype, quantize="int8")
    expected = quantized(load_weights(path, dtype="float32")[1])
    assert {name: array.shape for name, array in loaded.items()} == expected_shapes(CONFIG, "int8")
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype, name
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


@pytest.mark.parametrize("quantize", ["int4", "", True])
def test_other_quantisations_are_refused(tmp_path, quantize):
    with pytest.raises(ValueError, match=r"quantize=.*expected None or one of \('int8',\)"):
        load_weights(write_gguf(tmp_path / "a", {}), dtype="float32", quantize=quantize)


# Models.


def test_quantised_weights_do_not_say_the_dtype_of_activations():
    weights = quantized(tiny_model.weights())
    with pytest.raises(ValueError, match="dtype=None: quantised weights do not say"):
        Gemma3(tiny_model.config(), weights)
    assert Gemma3(tiny_model.config(), weights, "bfloat16").dtype == "bfloat16"
    del weights["layers.0.q.scale"]
    with pytest.raises(ValueError, match=r"differ in \['layers\.0\.q\.scale'\]"):
        Gemma3(tiny_model.config(), weights, "float32")


def logits_of(weights, tokens: int = 24) -> np.ndarray:
    model = Gemma3(tiny_model.config(1), {k: jnp.asarray(v) for k, v in weights.items()}, "float32")
    run = SingleSequence(model, page_size=4, max_len=64, paddings=(1, 24))
    run.restart()
    return run.logits(run.prefill(np.arange(10, 10 + tokens), 24))


def test_logits_are_near_those_of_float32_and_need_a_scale_for_each_row():
    """Planted: the embedding of a token that is not in the text, a thousand times larger."""
    weights = {name: np.array(array) for name, array in tiny_model.weights(1).items()}
    weights["embed"][5] *= 1000
    exact = logits_of(weights)

    def error(kept) -> float:
        differences = np.delete(logits_of(kept) - exact, 5, axis=1)
        return np.sqrt((differences**2).mean()) / np.delete(exact, 5, axis=1).std()

    near = error(quantized(weights))
    assert near < 0.05
    scale = np.abs(weights["embed"]).max() / np.float32(127)
    coarse = quantized(weights) | {
        "embed": np.rint(weights["embed"] / scale).astype(np.int8),
        "embed.scale": np.full(len(weights["embed"]), scale),
    }
    assert error(coarse) > 10 * near


@pytest.mark.parametrize("rows", [1, 5])
def test_shared_by_two_devices(rows):
    """Scales are cut with their rows; products are those of one device."""
    config = dataclasses.replace(tiny_model.config(), num_kv_heads=2)
    weights = quantized(random_weights(config))
    mesh = make_mesh(tensor_parallel=2, data_parallel=1)
    x = np.random.default_rng(1).standard_normal((rows, config.embed_dim), np.float32)
    results = []
    for where in (None, mesh):
        model = Gemma3(config, place_weights(config, dict(weights), where), "float32")
        gate = model.blocks[0].mlp.gate
        run = nnx.jit(lambda model, x: (model.logits(x), model.blocks[0].mlp(x)))
        results.append([np.asarray(each) for each in run(model, x)])
    for alone, shared in zip(*results, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=1e-5, atol=1e-3)
    assert gate.weight[...].addressable_shards[0].data.shape == (config.mlp_dim // 2, 32)
    assert gate.scale[...].addressable_shards[0].data.shape == (config.mlp_dim // 2,)
