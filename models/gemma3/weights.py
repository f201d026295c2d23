"""The weights of a Gemma 3 as one table: names, shapes, logical axes, dtypes and initialisers.

Loading, sharding, random weights and ahead-of-time plans all read this table, so that none of
them can disagree with another about what a model is made of.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from jaxattn.models.gemma3.config import Gemma3Config

# What an axis of a weight counts. `sharding.RULES` says which of them are cut over devices.
Axis = Literal[
    "vocab",
    "embed",
    "q_heads",
    "kv_heads",
    "head",
    "mlp",
    "patches",
    "patch_values",
    "vision_embed",
    "vision_heads",
    "vision_mlp",
]
Quantization = Literal["int8"]  # see `quantize`
SCALE = ".scale"  # ends the name of a quantised matrix's scales
VISION = ("vision.", "projector.")  # begin the names of the vision tower's weights
_STEPS = 32  # of a random int8 weight in a standard deviation: 127 are four


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight: its shape and what each axis counts.

    Matrices are `[out, in]`. `norm`: the w of a gain `1 + w`, not the gain itself. `quantized`:
    rows are whole numbers, with scales under the same name and `SCALE`. `init`: what a random one
    is: normal, or the one scale that makes random whole numbers so.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    norm: bool = False
    quantized: Quantization | None = None
    init: Literal["normal", "scale"] = "normal"

    @property
    def wide(self) -> bool:
        """Kept in float32: gains, biases and scales. Matrices are kept in the model's dtype."""
        return len(self.shape) == 1

    def kept(self, dtype: DTypeLike) -> DTypeLike:
        """In which dtype the weight is kept by a model of this dtype."""
        return self.quantized or (jnp.float32 if self.wide else dtype)

    def draw(self, key: Array, std: ArrayLike, *, dtype: DTypeLike) -> Array:
        """A random one, as kept by a model of this dtype. Quantised, its scales give it `std`."""
        kept = jnp.dtype(self.kept(dtype))
        if self.init == "scale":
            return jnp.full(self.shape, jnp.asarray(std, kept) / _STEPS)
        normal = jax.random.normal(key, self.shape, jnp.float32 if self.quantized else kept)
        if self.quantized:
            return jnp.clip(jnp.round(normal * _STEPS), -127, 127).astype(kept)
        return jnp.asarray(std, kept) * normal


def weight_table(config: Gemma3Config, quantize: Quantization | None = None) -> dict[str, Weight]:
    """Every weight of a model by its canonical name. The head is the embedding.

    Quantised, a matrix of the text model is int8 and is followed by its scales, one for each row.
    """
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
    table |= {"final_norm": norm("embed")} | _vision_table(config)
    return table if quantize is None else _quantized(table, quantize)


def _vision_table(config: Gemma3Config) -> dict[str, Weight]:
    """The weights of the vision tower, if there is one, and of its projector."""
    vision = config.vision
    if vision is None:
        return {}
    sizes: dict[Axis, int] = {
        "embed": config.embed_dim,
        "patches": vision.patches_per_side**2,
        "patch_values": vision.patch_size**2 * 3,  # row by row of pixels, as [height, width, 3]
        "vision_embed": vision.embed_dim,
        "vision_heads": vision.embed_dim,
        "vision_mlp": vision.mlp_dim,
    }

    def weight(*axes: Axis, norm: bool = False) -> Weight:
        return Weight(shape=tuple(sizes[axis] for axis in axes), axes=axes, norm=norm)

    def linear(name: str, out: Axis, into: Axis) -> dict[str, Weight]:
        return {name: weight(out, into), f"{name}_bias": weight(out)}

    def layer_norm(name: str) -> dict[str, Weight]:
        return {name: weight("vision_embed"), f"{name}_bias": weight("vision_embed")}

    layer = {
        **layer_norm("attn_norm"),
        **linear("q", "vision_heads", "vision_embed"),
        **linear("k", "vision_heads", "vision_embed"),
        **linear("v", "vision_heads", "vision_embed"),
        **linear("o", "vision_embed", "vision_heads"),
        **layer_norm("mlp_norm"),
        **linear("up", "vision_mlp", "vision_embed"),
        **linear("down", "vision_embed", "vision_mlp"),
    }
    tower = linear("patch", "vision_embed", "patch_values")
    tower |= {"positions": weight("patches", "vision_embed")}
    for index in range(vision.num_layers):
        tower |= {f"layers.{index}.{name}": each for name, each in layer.items()}
    tower |= layer_norm("final_norm")
    return {f"vision.{name}": each for name, each in tower.items()} | {
        "projector.norm": weight("vision_embed", norm=True),
        "projector.out": weight("embed", "vision_embed"),
    }


def _quantized(table: dict[str, Weight], quantize: Quantization) -> dict[str, Weight]:
    """The same weights with the matrices of the text model in int8, followed by their scales."""
    result: dict[str, Weight] = {}
    for name, weight in table.items():
        if weight.wide or not (name == "embed" or name.startswith("layers.")):
            result[name] = weight
            continue
        result[name] = replace(weight, quantized=quantize)
        result[name + SCALE] = Weight(shape=weight.shape[:1], axes=weight.axes[:1], init="scale")
    return result


def quantization_of(names: Iterable[str]) -> Quantization | None:
    """How weights of these names are quantised."""
    return "int8" if any(name.endswith(SCALE) for name in names) else None


def expected_shapes(
    config: Gemma3Config, quantize: Quantization | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's weights."""
    return {name: weight.shape for name, weight in weight_table(config, quantize).items()}


def weights_below(prefix: str, weights: dict[str, Array]) -> dict[str, Array]:
    """The weights whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }
