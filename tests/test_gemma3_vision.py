"""Multimodal models against transformers' outputs (see tests/data/gemma3_vision)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxattn.kernels.mask import visible
from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import weight_specs
from jaxattn.models.gemma3.vision import VisionTower
from jaxattn.models.gemma3.weights import expected_shapes, weight_table
from tests import tiny_vision, vision_models
from tests.image_prompts import oracle_logits, reference_prompt
from tests.tiny_checkpoints import write_folder
from tests.tiny_vision import CASES, DATA, hf_tensors

NAME = "wide_window"
OLD_TOWER, OLD_PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
TOWER, PROJECTOR, TEXT = "model.vision_tower.", "model.multi_modal_projector.", "model.language_"
V = f"{TOWER}encoder.layers.1.self_attn.v_proj.bias"


# Numbers.


@pytest.mark.parametrize(("name", "images"), CASES)
def test_image_embeddings(name, images):
    model, pixels = vision_models.load(name), tiny_vision.pixels(name, images)
    expected = np.load(DATA / f"{name}_{images}.npz")["image_embeddings"]
    for each in (pixels, pixels.astype(np.float32) / 127.5 - 1):
        embeddings = model.encode_images(each)
        assert embeddings.dtype == jnp.float32
        np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)


def test_image_embeddings_in_bfloat16(tmp_path):
    folder = vision_models.write(tmp_path, NAME)
    config, weights = load_weights(folder, dtype="bfloat16")
    kept = {name: array.dtype for name, array in weights.items()}
    wide = {str(kept[name]) for name, weight in weight_table(config).items() if weight.wide}
    assert wide == {"float32"}
    assert kept["vision.positions"] == kept["projector.out"] == ml_dtypes.bfloat16
    tower = VisionTower(config, {name: jnp.asarray(array) for name, array in weights.items()})
    embeddings = jax.jit(tower)(tiny_vision.pixels(NAME, 2))
    expected = np.load(DATA / f"{NAME}_2.npz")["image_embeddings"]
    assert embeddings.dtype == jnp.bfloat16
    assert np.abs(np.asarray(embeddings, np.float32) - expected).max() < 0.05


def spans_of(name: str, images: int) -> np.ndarray:
    """Start and end of the image that each token belongs to."""
    ids, spans = tiny_vision.prompt(name, images)
    per_token = np.zeros((len(ids), 2), np.int32)
    for start, end in spans:
        per_token[start:end] = start, end
    return per_token


@pytest.mark.parametrize(("name", "images"), CASES)
def test_masks(name, images):
    reference = np.load(DATA / f"{name}_{images}.npz")
    spans = jnp.asarray(spans_of(name, images))
    positions = jnp.arange(len(spans), dtype=jnp.int32)
    window = tiny_vision.CONFIGS[name]["text_config"]["sliding_window"]
    for mask, sliding_window in (("global_mask", None), ("window_mask", window)):
        seen = visible(
            positions,
            positions,
            sliding_window=sliding_window,
            image_spans=spans,
            image_rule="clamp",
        )
        assert np.array_equal(seen, reference[mask]), mask
    # The narrow window cuts an image; the wide one does not.
    rows = reference["window_mask"][slice(*tiny_vision.prompt(name, images)[1][0])]
    tokens = tiny_vision.CONFIGS[name]["mm_tokens_per_image"]
    assert (rows.sum(axis=1).min() < tokens) == (name != "wide_window")


@pytest.mark.parametrize(("name", "images"), CASES)
def test_logits_of_the_whole_model(name, images):
    """Of the prompt and of the greedy text that follows it."""
    ids, placed = reference_prompt(name, images)
    reference = np.load(DATA / f"{name}_{images}.npz")
    logits = oracle_logits(name, ids + reference["greedy_ids"].tolist(), placed)
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=2e-5)


# Loading.


def renamed(prefixes: dict[str, str]) -> dict[str, np.ndarray]:
    """The tensors of a tiny model, with other prefixes."""
    tensors = hf_tensors(NAME)
    for old, new in prefixes.items():
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: array
            for name, array in tensors.items()
        }
    return tensors


def write(folder, tensors, dtype=np.float32):
    return write_folder(folder, tensors, config_json=tiny_vision.CONFIGS[NAME], dtype=dtype)


@pytest.mark.parametrize(
    "prefixes",
    [
        {TOWER: OLD_TOWER, PROJECTOR: OLD_PROJECTOR, TEXT: "language_model."},  # v4
        {TOWER: TOWER + "vision_model."},  # v5, at first
        {TOWER: "vision_tower.", PROJECTOR: OLD_PROJECTOR},
    ],
)
def test_every_prefix(tmp_path, prefixes):
    loaded = load_weights(write(tmp_path / "a", renamed(prefixes)), dtype="float32")
    config, expected = load_weights(write(tmp_path / "b", hf_tensors(NAME)), dtype="float32")
    assert loaded[0] == config
    assert list(loaded[1]) == list(expected) == list(expected_shapes(config))
    assert all(np.array_equal(loaded[1][name], array) for name, array in expected.items())


def test_the_text_model_alone(tmp_path):
    tensors = hf_tensors(NAME) | {V: np.zeros(3, np.int64)}  # not even looked at
    config, weights = load_weights(write(tmp_path, tensors), dtype="float32", images=False)
    assert config == replace(vision_models.load(NAME).config, vision=None)
    assert list(weights) == list(expected_shapes(config))
    model = Gemma3(config, {name: jnp.asarray(array) for name, array in weights.items()})
    with pytest.raises(ValueError, match="no vision tower: images need the Hugging Face folder"):
        model.encode_images(tiny_vision.pixels(NAME, 1))


def test_all_problems_are_in_one_error(tmp_path):
    tensors = hf_tensors(NAME)
    del tensors[V]
    patch, projection = (
        f"{TOWER}embeddings.patch_embedding.weight",
        f"{PROJECTOR}mm_input_projection_weight",
    )
    tensors[patch] = tensors[patch].transpose(0, 2, 3, 1).copy()
    tensors[projection] = tensors[projection].T.copy()
    tensors[f"{TOWER}head.probe"] = np.zeros((1, 1, 24), np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_weights(write(tmp_path, tensors), dtype="float32")
    message = str(caught.value)
    assert f"missing: {V}" in message
    assert f"wrong shape: {patch} is (24, 7, 7, 3), expected (24, 3, 7, 7)" in message
    assert f"wrong shape: {projection} is (32, 24), expected (24, 32)" in message
    assert f"unexpected: {TOWER}head.probe (1, 1, 24)" in message


def test_no_tower_at_all(tmp_path):
    tensors = {name: array for name, array in hf_tensors(NAME).items() if TEXT in name}
    with pytest.raises(CheckpointError, match=r"missing: model\.vision_tower\..*\n  and \d+ more"):
        load_weights(write(tmp_path, tensors), dtype="float32")


def test_a_tower_that_the_config_does_not_have(tmp_path):
    config_json = tiny_vision.CONFIGS[NAME] | {"vision_config": None}
    folder = write_folder(tmp_path, hf_tensors(NAME), config_json=config_json)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.vision_tower\."):
        load_weights(folder, dtype="float32")


@pytest.mark.parametrize("name", [V, f"{PROJECTOR}mm_input_projection_weight"])
def test_values_that_are_not_finite_are_named(tmp_path, name):
    tensors = hf_tensors(NAME)
    tensors[name].flat[-1] = np.nan
    with pytest.raises(CheckpointError, match=f"NaN or infinity in {name}"):
        load_weights(write(tmp_path, tensors), dtype="bfloat16")


def test_integers_are_refused(tmp_path):
    tensors = hf_tensors(NAME) | {V: np.zeros(24, np.int64)}
    with pytest.raises(CheckpointError, match=r"v_proj\.bias \(I64\)"):
        load_weights(write(tmp_path, tensors), dtype="float32")


# Shapes and refusals.


def test_shapes_of_the_4b():
    config = CONFIGS["gemma-3-4b"]
    shapes = expected_shapes(config)
    text = expected_shapes(replace(config, vision=None))
    vision = {name: shape for name, shape in shapes.items() if name not in text}
    # 417 million in the tower, 2.9 million in the projector
    assert sum(int(np.prod(shape)) for shape in vision.values()) == 416_866_032 + 2_950_272
    assert len(vision) == 7 + 16 * 27
    assert vision["vision.patch"] == (1152, 14 * 14 * 3)
    assert vision["vision.positions"] == (4096, 1152)
    assert vision["projector.out"] == (2560, 1152)


def test_the_tower_is_whole_on_every_device():
    specs = weight_specs(CONFIGS["gemma-3-4b"])
    assert not any(any(spec) for name, spec in specs.items() if name.startswith("vision."))
    assert tuple(specs["projector.out"]) == (None, None)


def test_memory_does_not_grow_with_images():
    tower = vision_models.load("global_only").vision
    graph, state = nnx.split(tower)

    def temporaries(images: int) -> int:
        pixels = jax.ShapeDtypeStruct((images, 36, 36, 3), jnp.uint8)
        compiled = jax.jit(lambda state, pixels: nnx.merge(graph, state)(pixels))
        return compiled.lower(state, pixels).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 1.5 * temporaries(2)


@pytest.mark.parametrize("shape", [(1, 3, 28, 28), (28, 28, 3), (1, 28, 27, 3)])
def test_pixels_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"expected \[images, 28, 28, 3\]"):
        vision_models.load(NAME).encode_images(jnp.zeros(shape))


def test_pixels_of_another_kind():
    with pytest.raises(
        ValueError, match=r"pixels of int32: expected uint8, or floats in \[-1, 1\]"
    ):
        vision_models.load(NAME).encode_images(jnp.zeros((1, 28, 28, 3), jnp.int32))


def test_a_tower_without_a_config():
    with pytest.raises(ValueError, match="no vision tower"):
        VisionTower(replace(vision_models.load(NAME).config, vision=None), {})
