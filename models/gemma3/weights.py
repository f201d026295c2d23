"""The weights of a Gemma 3 as one table: names, shapes, logical axes and kept dtypes.

Loading, sharding, random weights and ahead-of-time plans all read this table, so that none of
them can disagree with another about what a model is made of.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxattn.models.gemma3.config import Gemma3Config

# What an axis of a weight counts. `sharding.RULES` says which of them are cut over devices.
Axis = Literal["vocab", "embed", "q_heads", "kv_heads", "head", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight: its shape and what each axis counts.

    `norm`: the w of a gain `1 + w`, kept in float32; the other weights are kept in the model's
    dtype, and matrices are `[out, in]`.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    norm: bool = False


def weight_table(config: Gemma3Config) -> dict[str, Weight]:
    """Every weight of a model by its canonical name. The head is the embedding."""
    sizes: dict[Axis, int] = {
        "vocab": config.vocab_size,
        "embed": config.embed_dim,
        "q_heads": config.num_q_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
        "mlp": config.mlp_dim,
    }

    def matrix(out: Axis, into: Axis) -> Weight:
        return Weight(shape=(sizes[out], sizes[into]), axes=(out, into))

    def norm(axis: Axis) -> Weight:
        return Weight(shape=(sizes[axis],), axes=(axis,), norm=True)

    layer = {
        "attn_norm": norm("embed"),
        "q": matrix("q_heads", "embed"),
        "k": matrix("kv_heads", "embed"),
        "v": matrix("kv_heads", "embed"),
        "o": matrix("embed", "q_heads"),
        "q_norm": norm("head"),
        "k_norm": norm("head"),
        "post_attn_norm": norm("embed"),
        "mlp_norm": norm("embed"),
        "gate": matrix("mlp", "embed"),
        "up": matrix("mlp", "embed"),
        "down": matrix("embed", "mlp"),
        "post_mlp_norm": norm("embed"),
    }
    table = {"embed": matrix("vocab", "embed")}
    for index in range(config.num_layers):
        table |= {f"layers.{index}.{name}": weight for name, weight in layer.items()}
    return table | {"final_norm": norm("embed")}


def expected_shapes(config: Gemma3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's weights."""
    return {name: weight.shape for name, weight in weight_table(config).items()}


def random_weights(
    config: Gemma3Config, key: Array, dtype: str = "float32", scale: float = 0.02
) -> dict[str, Array]:
    """Normal random weights of the right names and shapes, for tests and shape checks."""
    shapes = expected_shapes(config)
    keys = jax.random.split(key, len(shapes))
    return {
        name: scale * jax.random.normal(each, shape, jnp.dtype(dtype))
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
