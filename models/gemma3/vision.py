"""Gemma 3's eyes: a SigLIP tower, its patches pooled and projected to embeddings of the text model.

Source: Zhai et al., 2023 (SigLIP); Gemma 3 technical report, 2025.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.layers import RMSNorm
from jaxattn.models.gemma3.linear import Linear, project
from jaxattn.models.gemma3.vision_config import VisionConfig
from jaxattn.models.gemma3.weights import weights_below


class BiasedLinear(nnx.Module):
    """`y = x W^T + b`, added in float32."""

    def __init__(self, weights: dict[str, Array], name: str):
        self.weight = nnx.Param(weights[name])
        self.bias = nnx.Param(weights[f"{name}_bias"])

    def __call__(self, x: Float[Array, "patches in"]) -> Float[Array, "patches out"]:
        wide = project(x, self.weight[...], jnp.dtype(jnp.float32))
        return (wide + self.bias[...].astype(jnp.float32)[None]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + eps) * gain + bias` over the last axis, in float32."""

    def __init__(self, weights: dict[str, Array], name: str, eps: float):
        self.gain = nnx.Param(weights[name])
        self.bias = nnx.Param(weights[f"{name}_bias"])
        self.eps = eps

    def __call__(self, x: Float[Array, "patches embed"]) -> Float[Array, "patches embed"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        gain, bias = (param[...].astype(jnp.float32)[None] for param in (self.gain, self.bias))
        return (centred * jax.lax.rsqrt(variance + self.eps) * gain + bias).astype(x.dtype)


class VisionBlock(nnx.Module):
    """Attention among all patches and an MLP, each behind a norm, each added to the stream."""

    def __init__(self, weights: dict[str, Array], config: VisionConfig):
        self.attn_norm = LayerNorm(weights, "attn_norm", config.layer_norm_eps)
        self.q = BiasedLinear(weights, "q")
        self.k = BiasedLinear(weights, "k")
        self.v = BiasedLinear(weights, "v")
        self.o = BiasedLinear(weights, "o")
        self.mlp_norm = LayerNorm(weights, "mlp_norm", config.layer_norm_eps)
        self.up = BiasedLinear(weights, "up")
        self.down = BiasedLinear(weights, "down")
        self.num_heads = config.num_heads

    def __call__(self, x: Float[Array, "patches embed"]) -> Float[Array, "patches embed"]:
        x = x + self._attend(self.attn_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=True))

    def _attend(self, x: Float[Array, "patches embed"]) -> Float[Array, "patches embed"]:
        def heads(projected: Float[Array, "patches flat"]) -> Float[Array, "heads patches dim"]:
            return jnp.swapaxes(projected.reshape(x.shape[0], self.num_heads, -1), 0, 1)

        # One head at a time: the scores of all would be 1 GiB in float32 (16 x 4096 x 4096).
        out = jax.lax.map(_attend_all, (heads(self.q(x)), heads(self.k(x)), heads(self.v(x))))
        return self.o(jnp.swapaxes(out, 0, 1).reshape(x.shape))


def _attend_all(
    head: tuple[
        Float[Array, "patches dim"], Float[Array, "patches dim"], Float[Array, "patches dim"]
    ],
) -> Float[Array, "patches dim"]:
    """Attention of one head in which every patch sees every patch; scores in float32."""
    queries, keys, values = head
    wide = jnp.dtype(jnp.float32)
    scores = project(queries, keys, wide) * queries.shape[1] ** -0.5
    weights = jax.nn.softmax(scores).astype(values.dtype)
    return jnp.einsum("qk,kd->qd", weights, values, preferred_element_type=wide).astype(
        values.dtype
    )


class VisionTower(nnx.Module):
    """From pictures to embeddings. `weights` are those of the whole model.

    Activations have the dtype of the patch weight (float32 or bfloat16); norms, biases, attention
    scores and the pooling are float32.
    """

    def __init__(self, config: Gemma3Config, weights: dict[str, Array]):
        if config.vision is None:
            raise ValueError("the config has no vision tower")
        self.config = vision = config.vision
        own = weights_below("vision.", weights)
        self.patch = BiasedLinear(own, "patch")
        self.positions = nnx.Param(own["positions"])
        self.blocks = nnx.List(
            VisionBlock(weights_below(f"layers.{index}.", own), vision)
            for index in range(vision.num_layers)
        )
        self.final_norm = LayerNorm(own, "final_norm", vision.layer_norm_eps)
        self.projector_norm = RMSNorm(weights["projector.norm"], vision.layer_norm_eps)
        self.projector = Linear(weights["projector.out"])

    def __call__(
        self, pixels: Num[Array, "images height width 3"]
    ) -> Float[Array, "images tokens embed"]:
        """What takes the place of the image tokens' embeddings, as it is: it is not multiplied by
        `sqrt(embed_dim)`, as those of text are.

        `pixels`: bytes, see `images.preprocess`, or floats in [-1, 1]. One image at a time, so that
        memory does not grow with their number. Call it under `jax.jit`, which compiles for each
        number of images.
        """
        size = self.config.image_size
        if pixels.ndim != 4 or pixels.shape[1:] != (size, size, 3):
            raise ValueError(f"pixels {pixels.shape}: expected [images, {size}, {size}, 3]")
        if pixels.dtype != jnp.uint8 and not jnp.issubdtype(pixels.dtype, jnp.floating):
            raise ValueError(f"pixels of {pixels.dtype}: expected uint8, or floats in [-1, 1]")
        return jax.lax.map(self._encode, pixels)

    def _encode(self, image: Num[Array, "height width 3"]) -> Float[Array, "tokens embed"]:
        if image.dtype == jnp.uint8:
            image = image.astype(jnp.float32) / 127.5 - 1
        x = self.patch(self._patches(image.astype(self.positions.dtype)))
        x = x + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.projector(self.projector_norm(self._pool(self.final_norm(x))))

    def _patches(
        self, image: Float[Array, "height width 3"]
    ) -> Float[Array, "patches patch_values"]:
        side, size = self.config.patches_per_side, self.config.patch_size
        cut = image.reshape(side, size, side, size, 3)
        return jnp.swapaxes(cut, 1, 2).reshape(side * side, -1)

    def _pool(self, x: Float[Array, "patches embed"]) -> Float[Array, "tokens embed"]:
        """The mean of each square of patches."""
        tokens = self.config.tokens_per_side
        each = self.config.patches_per_side // tokens
        squares = x.astype(jnp.float32).reshape(tokens, each, tokens, each, -1)
        return squares.mean(axis=(1, 3)).reshape(tokens * tokens, -1).astype(x.dtype)
