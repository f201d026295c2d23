"""The model's own call with images: who sees whom, by planted embeddings and in the kernels."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.plan import group_layers
from jaxattn.cache.state import init_cache
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.models.gemma3.sharding import random_weights
from jaxattn.models.gemma3.weights import expected_shapes
from tests import vision_models

WIDE = vision_models.load("wide_window").config
LOCAL, GLOBAL = (
    next(layer for layer in WIDE.layers if (layer.sliding_window is None) == is_global)
    for is_global in (False, True)
)
WINDOW, TOKENS = 5, 24
IMAGES = ((3, 12), (14, 20))


@cache
def make_model(*layers, dtype="float32", **sizes):
    layers = tuple(replace(each, sliding_window=each.sliding_window and WINDOW) for each in layers)
    config = replace(WIDE, layers=layers, **sizes)
    return Gemma3(config, random_weights(config, jax.random.key(0), dtype=dtype, scale=0.3))


def hidden(model, embeddings, page_size=4, **attention):
    """Hidden states of all tokens in one step; each token's id is its position."""
    dtype = model.embed[...].dtype.name
    specs = layer_specs(model.config, page_size=page_size, kv_dtype=dtype)
    plan = group_layers(specs, hybrid=False, max_len=TOKENS)
    pages = -(-TOKENS // page_size)
    table = jnp.arange(1, 1 + pages, dtype=jnp.int32)[None]
    batch = RaggedBatch(
        kv_lens=jnp.array([TOKENS], jnp.int32),
        cu_q_lens=jnp.array([0, TOKENS], jnp.int32),
        distribution=jnp.array([0, 1, 1], jnp.int32),
        tables=(PageTable(table, jnp.zeros(1, jnp.int32)),),
    )
    spans = np.zeros((TOKENS, 2), np.int32)
    for start, end in IMAGES:
        spans[start:end] = start, end
    rows, _ = model(
        jnp.arange(TOKENS, dtype=jnp.int32),
        init_cache(plan, (1 + pages,)),
        plan=plan,
        batch=batch,
        image_embeddings=jnp.asarray(embeddings),
        image_spans=jnp.asarray(spans),
        **attention,
    )
    return rows


def random_embeddings(model):
    draw = np.random.default_rng(1)
    return draw.standard_normal((TOKENS, model.config.embed_dim)).astype(np.float32)


def sees(query, key, window):
    one_image = any(start <= query < end and start <= key < end for start, end in IMAGES)
    return (key <= query or one_image) and (window is None or query - window < key)


@pytest.mark.parametrize("layer", [LOCAL, GLOBAL], ids=["local", "global"])
def test_who_sees_a_planted_embedding(layer):
    """A token of an image is seen by earlier ones of its image, and by none beyond the window."""
    model = make_model(layer)
    window = model.config.layers[0].sliding_window
    call = jax.jit(lambda embeddings: hidden(model, embeddings, backend="xla"))
    embeddings = random_embeddings(model)
    before = np.asarray(call(embeddings))
    for planted in range(TOKENS):
        changed = embeddings.copy()
        changed[planted] += 1
        differs = (np.asarray(call(changed)) != before).any(axis=1)
        is_image = any(start <= planted < end for start, end in IMAGES)
        expected = [is_image and sees(query, planted, window) for query in range(TOKENS)]
        assert differs.tolist() == expected, planted


@pytest.mark.parametrize(
    ("backend", "dtype", "page_size", "limit"),
    [
        pytest.param("pallas_tpu", "float32", 8, 1e-3, marks=pytest.mark.slow),
        pytest.param("pallas_gpu", "bfloat16", 16, 0.1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layer", [LOCAL, GLOBAL], ids=["local", "global"])
def test_kernels_agree(layer, backend, dtype, page_size, limit):
    """In their interpreters."""
    model = make_model(layer, dtype=dtype, head_dim=64)
    embeddings = random_embeddings(model)
    wanted, found = (
        np.asarray(hidden(model, embeddings, page_size, **options), np.float32)
        for options in ({"backend": "xla"}, {"backend": backend, "interpret": True})
    )
    assert wanted.std() > 0.5
    np.testing.assert_allclose(found, wanted, atol=limit, rtol=limit)


def test_images_that_are_half_given():
    model = make_model(LOCAL)
    config = replace(model.config, vision=None)
    text = Gemma3(config, {n: jnp.zeros(shape) for n, shape in expected_shapes(config).items()})
    ids, batch = jnp.zeros(4, jnp.int32), RaggedBatch(*[jnp.zeros(1, jnp.int32)] * 3, tables=())
    plan = group_layers(layer_specs(model.config, page_size=4, kv_dtype="float32"), max_len=8)
    options = {"plan": plan, "batch": batch, "image_spans": jnp.zeros((4, 2), jnp.int32)}
    with pytest.raises(ValueError, match="give image_embeddings and image_spans, or neither"):
        model(ids, init_cache(plan, [2]), **options)
    with pytest.raises(ValueError, match="image_spans for a text model"):
        text(ids, init_cache(plan, [2]), **options)
