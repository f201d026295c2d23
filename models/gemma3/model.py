"""Gemma 3: embedding, blocks, tied head, on the paged cache; the vision tower in front."""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.layers import Block, RMSNorm
from jaxattn.models.gemma3.linear import project
from jaxattn.models.gemma3.vision import VisionTower
from jaxattn.models.gemma3.weights import expected_shapes, weights_below
from jaxattn.spec import LayerSpec, MaskSpec, StoreSpec


def layer_specs(
    config: Gemma3Config, *, page_size: int, kv_dtype: str, shards: int = 1
) -> tuple[LayerSpec, ...]:
    """The attention layers of a model, for `jaxattn.group_layers`, on `shards` devices."""
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
            mask=MaskSpec(sliding_window=record.sliding_window),
            store=store,
        )
        for index, record in enumerate(config.layers)
    )


class Gemma3(nnx.Module):
    """The model. `weights` are named and shaped as by `expected_shapes(config)`.

    Activations have the dtype of the embedding (float32 or bfloat16); norms, rotary angles,
    attention scores and logits are float32.
    """

    def __init__(self, config: Gemma3Config, weights: dict[str, Array]):
        shapes = {name: tuple(array.shape) for name, array in weights.items()}
        expected = expected_shapes(config)
        if shapes != expected:
            differ = sorted(name for name, _ in shapes.items() ^ expected.items())
            raise ValueError(f"weights do not fit the config; they differ in {sorted(set(differ))}")
        self.config = config
        self.embed = nnx.Param(weights["embed"])
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
        **attention: Any,
    ) -> tuple[Float[Array, "tokens embed"], CacheState]:
        """Final hidden states of a step's flat tokens, and the cache with their KV written.

        `attention`: `backend`, `target`, `heads_axis` and the like, as of `jaxattn.attend`.

        `plan` must be made from `layer_specs` of this config (masks come from its layers).
        """
        if len(plan.layers) != len(self.blocks):
            raise ValueError(f"a plan of {len(plan.layers)} layers for {len(self.blocks)} blocks")
        x = jnp.take(self.embed[...], token_ids, axis=0)
        x = x * jnp.asarray(math.sqrt(self.config.embed_dim), x.dtype)
        for layer, block in zip(plan.layers, self.blocks, strict=True):
            x, cache = block(x, cache, layer=layer, plan=plan, batch=batch, **attention)
        return self.final_norm(x), cache

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Next-token logits in float32, from the tied embedding."""
        return project(hidden, self.embed[...], jnp.dtype(jnp.float32))

    def encode_images(
        self, pixels: Float[Array, "images height width 3"]
    ) -> Float[Array, "images tokens embed"]:
        """What takes the place of the image tokens' embeddings; see `VisionTower`."""
        if self.vision is None:
            raise ValueError(
                "this model has no vision tower: images need the Hugging Face folder of a 4B, 12B "
                "or 27B, loaded with images=True"
            )
        return self.vision(pixels)
