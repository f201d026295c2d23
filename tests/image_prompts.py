"""Prompts with random pictures for the tiny multimodal models, and what a whole model says of them.

A prompt is a list of words' ids and of names of pictures: `[5, 6, "a", 7]`.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.plan import group_layers
from jaxattn.cache.state import init_cache
from jaxattn.engine.images import Image, PlacedImage
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.sampling import SamplingParams
from tests import tiny_vision, vision_models
from tests.tiny_model import PlainText

MAX_LEN = 96
Prompt = list[int | str]


def picture(model: Gemma3, name: str) -> Image:
    """A random picture; the same for the same name, in memory of its own."""
    draw = np.random.default_rng([*name.encode()])
    size = model.config.vision.image_size
    pixels = draw.integers(0, 256, (size, size, 3), np.uint8)
    return Image.of(pixels, vocab_size=model.config.vocab_size)


def tokens_of(model: Gemma3, prompt: Prompt) -> tuple[list[int], list[PlacedImage]]:
    ids, placed = [], []
    for part in prompt:
        if isinstance(part, str):
            image, start = picture(model, part), len(ids)
            ids += [image.token_id] * model.config.vision.tokens_per_image
            placed.append(PlacedImage(start, len(ids), image))
        else:
            ids.append(part)
    return ids, placed


def reference_prompt(name: str, images: int) -> tuple[list[int], list[PlacedImage]]:
    """The prompt of a reference of transformers."""
    ids, spans = tiny_vision.prompt(name, images)
    placed = [
        PlacedImage(*span, Image.of(pixels, vocab_size=tiny_vision.VOCAB))
        for span, pixels in zip(spans, tiny_vision.pixels(name, images), strict=True)
    ]
    ids = ids.tolist()
    for each in placed:
        ids[each.start : each.end] = [each.image.token_id] * (each.end - each.start)
    return ids, placed


def add(engine, prompt, params=None, **options):
    """Queue a prompt, or the tokens and images of one."""
    params = params or SamplingParams(max_tokens=6, temperature=0)
    return engine.add(
        prompt[0], params, **{"seed": 0, "stream": PlainText(), "images": prompt[1]} | options
    )


@cache
def forward(name: str):
    """`(ids[MAX_LEN], embeddings, spans) -> logits[MAX_LEN, vocab]`, dense and in one shot."""
    model = vision_models.load(name)
    specs = layer_specs(model.config, page_size=MAX_LEN, kv_dtype="float32")
    plan = group_layers(specs, hybrid=False, max_len=MAX_LEN)

    @jax.jit
    def whole(ids, embeddings, spans):
        batch = RaggedBatch(
            kv_lens=jnp.array([MAX_LEN], jnp.int32),
            cu_q_lens=jnp.array([0, MAX_LEN], jnp.int32),
            distribution=jnp.array([0, 1, 1], jnp.int32),
            tables=(PageTable(jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)),),
        )
        hidden, _ = model(
            ids,
            init_cache(plan, (2,)),
            plan=plan,
            batch=batch,
            backend="reference",
            image_embeddings=embeddings,
            image_spans=spans,
        )
        return model.logits(hidden)

    return whole


@cache
def encoder(name: str):
    """The embeddings of an image, kept."""
    encode = jax.jit(vision_models.load(name).encode_images)
    kept = {}

    def embeddings(image: Image) -> np.ndarray:
        if image.token_id not in kept:
            kept[image.token_id] = np.asarray(encode(image.pixels[None])[0])
        return kept[image.token_id]

    return embeddings


def oracle_logits(name: str, ids: list[int], images: list[PlacedImage]) -> np.ndarray:
    """Row i is what follows the first i + 1 tokens."""
    model = vision_models.load(name)
    vocab, embed = model.config.vocab_size, model.config.embed_dim
    padded, spans = np.zeros(MAX_LEN, np.int32), np.zeros((MAX_LEN, 2), np.int32)
    padded[: len(ids)] = [token if token < vocab else 0 for token in ids]
    embeddings = np.zeros((MAX_LEN, embed), np.float32)
    for each in images:
        spans[each.start : each.end] = each.start, each.end
        embeddings[each.start : each.end] = encoder(name)(each.image)
    return np.asarray(forward(name)(padded, embeddings, spans))[: len(ids)]


def assert_greedy(name: str, sequence) -> None:
    """Every new token of an engine's sequence is the oracle's best."""
    assert sequence.error is None
    best = oracle_logits(name, sequence.tokens, sequence.images).argmax(axis=1)
    assert sequence.new_tokens == best[sequence.num_prompt - 1 : -1].tolist()
