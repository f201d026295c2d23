"""How Gemma 3's weights are cut over devices that share the heads: rules as data."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.weights import SCALE, Axis, Quantization, Weight, weight_table
from jaxattn.sharding import HEADS

# For each logical axis the mesh axis that it is cut over; None: whole on every device.
RULES: Mapping[Axis, str | None] = {
    "vocab": HEADS,
    "embed": None,
    "q_heads": HEADS,
    "kv_heads": HEADS,
    "head": None,
    "mlp": HEADS,
    "patches": None,
    "patch_values": None,
    "vision_embed": None,
    "vision_heads": None,
    "vision_mlp": None,
}


def weight_specs(
    config: Gemma3Config, quantize: Quantization | None = None
) -> dict[str, PartitionSpec]:
    """The cut of every weight, on a mesh that `shared_config` has made the config fit for.

    Scales go with their rows.
    """
    return {
        name: PartitionSpec(*(RULES[axis] for axis in weight.axes))
        for name, weight in weight_table(config, quantize).items()
    }


def shared_config(config: Gemma3Config, size: int) -> Gemma3Config:
    """The config of the same model with at least one kv head for each of `size` devices.

    Fewer kv heads than devices are repeated: head h of the result is head
    `h * num_kv_heads // size` of the model, so that every query head still meets its own. What is
    made of this config (weights, layers, cache, its bytes) counts the repeated heads.

    Raises ValueError if heads, hidden units or vocabulary cannot be shared by `size` devices.
    """
    if _reason(config, size) is None:
        return replace(config, num_kv_heads=max(config.num_kv_heads, size))
    fitting = [each for each in range(1, size) if _reason(config, each) is None]
    most = max(fitting)
    replicas = f" with data_parallel={size // most}" if size % most == 0 else ""
    raise ValueError(
        f"{_reason(config, size)} cannot be shared by {size} devices; "
        f"{', '.join(map(str, fitting))} could: use tensor_parallel={most}{replicas}"
    )


def _reason(config: Gemma3Config, size: int) -> str | None:
    """What `size` devices cannot share, such as "4 query heads"; None if they can."""
    counts = {
        "query heads": config.num_q_heads,
        "hidden units": config.mlp_dim,
        "vocabulary entries": config.vocab_size,
    }
    for name, count in counts.items():
        if count % size:
            return f"{count} {name}"
    heads = config.num_kv_heads
    return f"{heads} kv heads" if heads % size and size % heads else None


def abstract_weights(
    config: Gemma3Config,
    dtype: str,
    mesh: Mesh | AbstractMesh | None = None,
    quantize: Quantization | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and, on a mesh, shardings of all weights; nothing is allocated."""
    specs = weight_specs(config, quantize)
    return {
        name: jax.ShapeDtypeStruct(
            weight.shape,
            jnp.dtype(weight.kept(dtype)),
            sharding=None if mesh is None else NamedSharding(mesh, specs[name]),
        )
        for name, weight in weight_table(config, quantize).items()
    }


def random_weights(
    config: Gemma3Config,
    key: Array,
    dtype: str = "float32",
    scale: float = 0.02,
    *,
    mesh: Mesh | None = None,
    quantize: Quantization | None = None,
) -> dict[str, Array]:
    """Normal random weights times `scale`, each as `abstract_weights` says, made where it belongs.

    The numbers do not depend on the mesh; quantised they are the same but for their rounding.
    """
    table = weight_table(config, quantize)
    names = [name for name in table if not name.endswith(SCALE)]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    return {
        name: _initialiser(table[name], dtype, leaf.sharding)(keys[name.removesuffix(SCALE)], scale)
        for name, leaf in abstract_weights(config, dtype, mesh, quantize).items()
    }


@cache
def _initialiser(weight: Weight, dtype: str, sharding: Sharding | None) -> Callable[..., Array]:
    """Compiled once for all layers."""
    return jax.jit(partial(weight.draw, dtype=dtype), out_shardings=sharding)
