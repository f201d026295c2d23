"""Gemma 3: embedding, blocks, tied head, on the paged cache; the vision tower in front."""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32, Num

from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.layers import Block, RMSNorm
from jaxattn.models.gemma3.linear import project
from jaxattn.models.gemma3.vision import VisionTower
from jaxattn.models.gemma3.weights import (
    SCALE,
    expected_shapes,
    quantization_of,
    weights_below,
)
from jaxattn.spec import LayerSpec, MaskSpec, StoreSpec


def layer_specs(
    config: Gemma3Config, *, page_size: int, kv_dtype: str, shards: int = 1
) -> tuple[LayerSpec, ...]:
    """The attention layers of a model, for `jaxattn.group_layers`, on `shards` devices.

    With a vision tower, a token of an image sees the image's later ones too, within the window.
    """
    store = StoreSpec(
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        shards=shards,
    )
    return tuple(
        LayerSpec(
            name=f"layers.{index}",
            num_q_heads=config.num_q_heads,
            scale=config.query_scale,
            mask=MaskSpec(
                sliding_window=record.sliding_window,
                image_rule="none" if config.vision is None else "clamp",
            ),
            store=store,
        )
        for index, record in enumerate(config.layers)
    )


class Gemma3(nnx.Module):
    """The model. `weights` are named and shaped as by `expected_shapes(config, quantize)`.

    Activations have `dtype`, float32 or bfloat16; None is the embedding's. Norms, rotary angles,
    attention scores and logits are float32.
    """

    def __init__(self, config: Gemma3Config, weights: dict[str, Array], dtype: str | None = None):
        shapes = {name: tuple(array.shape) for name, array in weights.items()}
        expected = expected_shapes(config, quantization_of(weights))
        if shapes != expected:
            differ = sorted(name for name, _ in shapes.items() ^ expected.items())
            raise ValueError(f"weights do not fit the config; they differ in {sorted(set(differ))}")
        if dtype is None and quantization_of(weights):
            raise ValueError(
                "dtype=None: quantised weights do not say what activations are kept in"
            )
        self.config = config
        self.dtype = dtype or weights["embed"].dtype.name
        self.embed = nnx.Param(weights["embed"])
        self.embed_scale = (
            nnx.Param(weights["embed" + SCALE]) if "embed" + SCALE in weights else None
        )
        self.blocks = nnx.List(
            Block(weights_below(f"layers.{index}.", weights), config, record)
            for index, record in enumerate(config.layers)
        )
        self.final_norm = RMSNorm(weights["final_norm"], config.rms_norm_eps)
        self.vision = VisionTower(config, weights) if config.vision else None

    def __call__(
        self,
        token_ids: Int32[Array, "tokens"],
        cache: CacheState,
        *,
        plan: CachePlan,
        batch: RaggedBatch,
        image_embeddings: Float[Array, "tokens embed"] | None = None,
        image_spans: Int32[Array, "tokens 2"] | None = None,
        **attention: Any,
    ) -> tuple[Float[Array, "tokens embed"], CacheState]:
        """Final hidden states of a step's flat tokens, and the cache with their KV written.

        `image_spans`: of each token, absolute start and end of its image, equal for text. Those of
        images, whose ids are not looked at, take their `image_embeddings` (see `encode_images`)
        as they are: only those of text are multiplied by `sqrt(embed_dim)`. All of an image, or
        its end if the cache has the rest, must be in one step.

        `attention`: `backend`, `target`, `heads_axis` and the like, as of `jaxattn.attend`.

        `plan` must be made from `layer_specs` of this config (masks come from its layers).
        """
        if len(plan.layers) != len(self.blocks):
            raise ValueError(f"a plan of {len(plan.layers)} layers for {len(self.blocks)} blocks")
        if image_spans is not None and self.config.vision is None:
            raise ValueError("image_spans for a text model")
        if (image_embeddings is None) != (image_spans is None):
            raise ValueError("give image_embeddings and image_spans, or neither")
        attention["image_spans"] = image_spans
        x = self._embed(token_ids, image_embeddings, image_spans)
        for layer, block in zip(plan.layers, self.blocks, strict=True):
            x, cache = block(x, cache, layer=layer, plan=plan, batch=batch, **attention)
        return self.final_norm(x), cache

    def _embed(
        self,
        token_ids: Int32[Array, "tokens"],
        image_embeddings: Float[Array, "tokens embed"] | None,
        image_spans: Int32[Array, "tokens 2"] | None,
    ) -> Float[Array, "tokens embed"]:
        is_image = None
        if image_spans is not None:
            is_image = image_spans[:, 0] < image_spans[:, 1]
            token_ids = jnp.where(is_image, 0, token_ids)
        x = jnp.take(self.embed[...], token_ids, axis=0)
        if self.embed_scale is not None:
            x = x.astype(jnp.float32) * jnp.take(self.embed_scale[...], token_ids)[:, None]
        x = x.astype(self.dtype) * jnp.asarray(math.sqrt(self.config.embed_dim), self.dtype)
        if is_image is None or image_embeddings is None:
            return x
        return jnp.where(is_image[:, None], image_embeddings.astype(x.dtype), x)

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Next-token logits in float32, from the tied embedding."""
        scale = None if self.embed_scale is None else self.embed_scale[...]
        return project(hidden, self.embed[...], jnp.dtype(jnp.float32), scale)

    def encode_images(
        self, pixels: Num[Array, "images height width 3"]
    ) -> Float[Array, "images tokens embed"]:
        """What takes the place of the image tokens' embeddings; see `VisionTower`."""
        if self.vision is None:
            raise ValueError(
                "this model has no vision tower: images need the Hugging Face folder of a 4B, 12B "
                "or 27B, loaded with images=True"
            )
        return self.vision(pixels)
