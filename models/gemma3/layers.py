"""The parts of a Gemma 3 block: norm, rotary embedding, attention, MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn.attention import attend
from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState
from jaxattn.models.gemma3.config import Gemma3Config, Gemma3Layer
from jaxattn.models.gemma3.linear import Linear
from jaxattn.spec import LayerSpec


class RMSNorm(nnx.Module):
    """`x / rms(x) * (1 + w)` over the last axis, computed in float32."""

    def __init__(self, weight: Float[Array, "dim"], eps: float):
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape dim"]) -> Float[Array, "*shape dim"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        gain = (1 + self.weight[...].astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * gain).astype(x.dtype)


def rope(
    x: Float[Array, "tokens heads head_dim"],
    positions: Int32[Array, "tokens"],
    *,
    theta: float,
    factor: float,
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate the two halves of each head by `position / factor * theta^(-2i / head_dim)`.

    Angles in float32: in bfloat16 the positions 256 and 257 are the same number.
    Source: Su et al., 2021 (RoFormer); linear position scaling by `factor`: Chen et al., 2023.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] / factor * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention on the paged cache, with normalised queries and keys."""

    def __init__(self, weights: dict[str, Array], config: Gemma3Config, record: Gemma3Layer):
        self.q = Linear.named("q", weights)
        self.k = Linear.named("k", weights)
        self.v = Linear.named("v", weights)
        self.o = Linear.named("o", weights)
        self.q_norm = RMSNorm(weights["q_norm"], config.rms_norm_eps)
        self.k_norm = RMSNorm(weights["k_norm"], config.rms_norm_eps)
        self.record = record
        self.head_dim = config.head_dim

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        cache: CacheState,
        *,
        layer: LayerSpec,
        plan: CachePlan,
        batch: RaggedBatch,
        **attention: Any,
    ) -> tuple[Float[Array, "tokens embed"], CacheState]:
        tokens = x.shape[0]
        positions = batch.places(tokens).positions
        theta, factor = self.record.rope_theta, self.record.rope_factor

        def heads(projected: Float[Array, "tokens flat"]) -> Float[Array, "tokens heads head_dim"]:
            return projected.reshape(tokens, -1, self.head_dim)

        queries = rope(self.q_norm(heads(self.q(x))), positions, theta=theta, factor=factor)
        keys = rope(self.k_norm(heads(self.k(x))), positions, theta=theta, factor=factor)
        values = heads(self.v(x))
        out, cache = attend(
            layer, queries, keys, values, cache, plan=plan, batch=batch, **attention
        )
        return self.o(out.reshape(tokens, -1)), cache


class MLP(nnx.Module):
    """`down(gelu(gate(x)) * up(x))`, gelu in its tanh form."""

    def __init__(self, weights: dict[str, Array]):
        self.gate = Linear.named("gate", weights)
        self.up = Linear.named("up", weights)
        self.down = Linear.named("down", weights)

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Block(nnx.Module):
    """Attention and MLP, each between two norms, each added to the residual stream."""

    def __init__(self, weights: dict[str, Array], config: Gemma3Config, record: Gemma3Layer):
        eps = config.rms_norm_eps
        self.attn_norm = RMSNorm(weights["attn_norm"], eps)
        self.attn = Attention(weights, config, record)
        self.post_attn_norm = RMSNorm(weights["post_attn_norm"], eps)
        self.mlp_norm = RMSNorm(weights["mlp_norm"], eps)
        self.mlp = MLP(weights)
        self.post_mlp_norm = RMSNorm(weights["post_mlp_norm"], eps)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        cache: CacheState,
        *,
        layer: LayerSpec,
        plan: CachePlan,
        batch: RaggedBatch,
        **attention: Any,
    ) -> tuple[Float[Array, "tokens embed"], CacheState]:
        attended, cache = self.attn(
            self.attn_norm(x), cache, layer=layer, plan=plan, batch=batch, **attention
        )
        x = x + self.post_attn_norm(attended)
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x))), cache
