"""The five published sizes of Gemma 3 as literals, and configs read from checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxattn.models.gemma3.errors import UnsupportedModelError
from jaxattn.models.gemma3.vision_config import VisionConfig as VisionConfig
from jaxattn.models.gemma3.vision_config import vision_from_hf
from jaxattn.spec import check_positive_float, check_positive_int, check_sliding_window

GLOBAL_EVERY = 6  # five local layers, then a global one
MAX_LAYERS = 1024  # more is a damaged file
VOCAB_SIZE = 262_144
PADDED_VOCAB_SIZE = 262_208  # of multimodal checkpoints: the last 64 rows are unused


@dataclass(frozen=True, kw_only=True)
class Gemma3Layer:
    """What differs from layer to layer, in one record: a window and its rotary embedding.

    `sliding_window` counts the query's own token, None is global. Angles are
    `position / rope_factor * rope_theta^(-2i / head_dim)`.
    """

    sliding_window: int | None
    rope_theta: float
    rope_factor: float

    def __post_init__(self) -> None:
        check_sliding_window(self.sliding_window)
        for name in ("rope_theta", "rope_factor"):
            check_positive_float(name, getattr(self, name))


_SIZES = (
    "embed_dim",
    "mlp_dim",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class Gemma3Config:
    """A text model, and the vision tower in front of it, None without one.

    `query_scale` multiplies q k: `1 / sqrt(query_pre_attn_scalar)`.
    """

    embed_dim: int
    mlp_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float
    max_position: int
    layers: tuple[Gemma3Layer, ...]
    vocab_size: int = VOCAB_SIZE
    rms_norm_eps: float = 1e-6
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_positive_int(name, getattr(self, name))
        if not self.layers:
            raise ValueError("layers is empty: a model has at least one")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary embedding needs two halves")
        for name in ("query_scale", "rms_norm_eps"):
            check_positive_float(name, getattr(self, name))

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)


def layer_pattern(
    num_layers: int,
    *,
    sliding_window: int,
    global_factor: float = 1.0,
    global_theta: float = 1_000_000.0,
    local_theta: float = 10_000.0,
    global_every: int = GLOBAL_EVERY,
) -> tuple[Gemma3Layer, ...]:
    """Every `global_every`-th layer is global; the tail, if any, is local."""
    check_positive_int("global_every", global_every)
    _check_num_layers(num_layers)
    local = Gemma3Layer(sliding_window=sliding_window, rope_theta=local_theta, rope_factor=1.0)
    full = Gemma3Layer(sliding_window=None, rope_theta=global_theta, rope_factor=global_factor)
    return tuple(full if (i + 1) % global_every == 0 else local for i in range(num_layers))


def _check_num_layers(count: object) -> None:
    check_positive_int("num_layers", count)
    if count > MAX_LAYERS:  # type: ignore[operator]
        raise ValueError(f"num_layers={count}: expected at most {MAX_LAYERS}")


CONFIGS: dict[str, Gemma3Config] = {
    "gemma-3-270m": Gemma3Config(
        embed_dim=640,
        mlp_dim=2048,
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=256,
        query_scale=256**-0.5,
        max_position=32_768,
        layers=layer_pattern(18, sliding_window=512),
    ),
    "gemma-3-1b": Gemma3Config(
        embed_dim=1152,
        mlp_dim=6912,
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=256,
        query_scale=256**-0.5,
        max_position=32_768,
        layers=layer_pattern(26, sliding_window=512),
    ),
    "gemma-3-4b": Gemma3Config(
        embed_dim=2560,
        mlp_dim=10_240,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=256,
        query_scale=256**-0.5,
        max_position=131_072,
        layers=layer_pattern(34, sliding_window=1024, global_factor=8.0),
        vision=VisionConfig(),
    ),
    "gemma-3-12b": Gemma3Config(
        embed_dim=3840,
        mlp_dim=15_360,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=256,
        query_scale=256**-0.5,
        max_position=131_072,
        layers=layer_pattern(48, sliding_window=1024, global_factor=8.0),
        vision=VisionConfig(),
    ),
    "gemma-3-27b": Gemma3Config(
        embed_dim=5376,
        mlp_dim=21_504,
        num_q_heads=32,
        num_kv_heads=16,
        head_dim=128,
        query_scale=168**-0.5,  # embed_dim / num_q_heads, not head_dim
        max_position=131_072,
        layers=layer_pattern(62, sliding_window=1024, global_factor=8.0),
        vision=VisionConfig(),
    ),
}


_HF_DEFAULTS: dict[str, Any] = {  # transformers', for keys that a config.json leaves out
    "vocab_size": PADDED_VOCAB_SIZE,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": GLOBAL_EVERY,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_HF_ONLY = {  # the values with which our model is the same
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "tie_word_embeddings": (True, None),
}


def from_hf(config_json: dict[str, Any], *, images: bool = True) -> Gemma3Config:
    """The config of a Hugging Face `config.json`: transformers v4 or v5, text or multimodal.

    `images=False` leaves the vision tower out, whatever it is. The vocabulary of multimodal
    checkpoints has 64 unused rows (262,208), which are cut off.
    Raises UnsupportedModelError for another model, or an option that would change the result.
    """
    text = config_json.get("text_config", config_json)
    if not isinstance(text, dict):
        raise UnsupportedModelError(f"config.json has text_config={text!r}, expected an object")
    for kind in (config_json.get("model_type"), text.get("model_type", "gemma3_text")):
        if kind not in ("gemma3", "gemma3_text"):
            raise UnsupportedModelError(
                f"config.json has model_type={kind!r}; only 'gemma3' and 'gemma3_text' are "
                "implemented"
            )
    for name, allowed in _HF_ONLY.items():
        value = text.get(name, config_json.get(name))
        if value not in allowed:
            raise UnsupportedModelError(
                f"config.json has {name}={value!r}; only {allowed[0]!r} is implemented"
            )

    def get(name: str) -> Any:
        value = text.get(name)
        return _HF_DEFAULTS[name] if value is None else value

    return Gemma3Config(
        embed_dim=get("hidden_size"),
        mlp_dim=get("intermediate_size"),
        num_q_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads"),
        head_dim=get("head_dim"),
        query_scale=float(get("query_pre_attn_scalar")) ** -0.5,
        max_position=get("max_position_embeddings"),
        layers=_hf_layers(text, get),
        vocab_size=_without_padding(get("vocab_size")),
        rms_norm_eps=float(get("rms_norm_eps")),
        vision=vision_from_hf(config_json) if images else None,
    )


def _hf_layers(text: dict[str, Any], get: Callable[[str], Any]) -> tuple[Gemma3Layer, ...]:
    count = get("num_hidden_layers")
    _check_num_layers(count)
    types = text.get("layer_types")
    if types is None:
        every = text.get("_sliding_window_pattern") or get("sliding_window_pattern")
        types = [
            "full_attention" if (index + 1) % every == 0 else "sliding_attention"
            for index in range(count)
        ]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != count:
        raise UnsupportedModelError(
            f"layer_types has {len(types)} entries for {count} layers, unknown: {sorted(unknown)}"
        )
    rope, scaling = text.get("rope_parameters"), text.get("rope_scaling")
    if rope and scaling:
        raise UnsupportedModelError("config.json has both rope_parameters and rope_scaling")
    if not rope:  # transformers v4: two bases, and a scaling of the global one
        rope = {
            "full_attention": {"rope_theta": get("rope_theta"), **(scaling or {})},
            "sliding_attention": {"rope_theta": get("rope_local_base_freq")},
        }
    kinds = {
        kind: Gemma3Layer(
            sliding_window=None if kind == "full_attention" else get("sliding_window"),
            rope_theta=theta,
            rope_factor=factor,
        )
        for kind in sorted(set(types))
        for theta, factor in [_rope(kind, rope)]
    }
    return tuple(kinds[kind] for kind in types)


def _rope(layer_type: str, rope: dict[str, Any]) -> tuple[float, float]:
    """Base and linear factor of one type of layer."""
    record = rope.get(layer_type) if isinstance(rope, dict) else None
    if not isinstance(record, dict) or "rope_theta" not in record:
        raise UnsupportedModelError(
            f"config.json: rope_parameters={rope!r} has no rope_theta for {layer_type!r}"
        )
    set_keys = {key for key, value in record.items() if value is not None}
    unknown = sorted(set_keys - {"rope_type", "type", "rope_theta", "factor"})
    kind = record.get("rope_type", record.get("type", "default"))
    if kind not in ("default", "linear") or unknown:
        raise UnsupportedModelError(
            f"config.json has rope type {kind!r} {unknown or ''}for {layer_type!r}: only 'default' "
            "and 'linear' (with its factor) are implemented"
        )
    if kind == "linear" and "factor" not in set_keys:
        raise UnsupportedModelError(
            f"config.json: rope type 'linear' of {layer_type!r} has no factor"
        )
    return float(record["rope_theta"]), float(record["factor"]) if kind == "linear" else 1.0


def _without_padding(vocab_size: int) -> int:
    return VOCAB_SIZE if vocab_size == PADDED_VOCAB_SIZE else vocab_size


def from_gguf(metadata: dict[str, Any]) -> Gemma3Config:
    """The config of a GGUF file from its metadata.

    Most files hold neither the layer pattern, the local rope base nor the query scale, and early
    ones of 4B, 12B and 27B no rope factor; they are then the published ones, by the number of
    layers (the scale differs from `1 / sqrt(head_dim)` only in the 62-layer 27B). There is never a
    vision tower in it. Raises UnsupportedModelError for another model, or an option that would
    change the result.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "gemma3":
        raise UnsupportedModelError(f"the file holds a {architecture!r} model, expected 'gemma3'")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"gemma3.{name}", default)
        if value is None:
            raise UnsupportedModelError(f"the file's metadata lack 'gemma3.{name}'")
        return value

    def size(name: str, default: int | None = None) -> int:
        value = get(name, default)
        if not isinstance(value, int):
            raise UnsupportedModelError(f"gemma3.{name}={value!r}: only one int is implemented")
        return value

    num_layers, head_dim = size("block_count"), size("attention.key_length")
    for name, allowed in {
        "attention.value_length": (head_dim,),
        "attention.causal": (True,),
        "attn_logit_softcapping": (0.0,),
        "final_logit_softcapping": (0.0,),
        "rope.scaling.type": ("linear", "none"),
        "rope.dimension_count": (head_dim,),
    }.items():
        if get(name, allowed[0]) not in allowed:
            raise UnsupportedModelError(
                f"gemma3.{name}={get(name)!r}: only {allowed[0]!r} is implemented"
            )
    linear = get("rope.scaling.type", "linear") == "linear"
    published_factor = 8.0 if num_layers in (34, 48, 62) else 1.0
    query_scale = (168 if num_layers == 62 else head_dim) ** -0.5
    if "tokenizer.ggml.tokens" in metadata:
        vocab_size = len(metadata["tokenizer.ggml.tokens"])
    else:
        vocab_size = size("vocab_size")
    return Gemma3Config(
        embed_dim=size("embedding_length"),
        mlp_dim=size("feed_forward_length"),
        num_q_heads=size("attention.head_count"),
        num_kv_heads=size("attention.head_count_kv"),
        head_dim=head_dim,
        query_scale=float(get("attention.scale", query_scale)),
        max_position=size("context_length"),
        layers=layer_pattern(
            num_layers,
            sliding_window=size("attention.sliding_window"),
            global_theta=float(get("rope.freq_base", get("rope.global.freq_base", 1_000_000.0))),
            global_factor=float(get("rope.scaling.factor", published_factor)) if linear else 1.0,
            local_theta=float(get("rope.freq_base_swa", get("rope.local.freq_base", 10_000.0))),
            global_every=size("attention.sliding_window_pattern", GLOBAL_EVERY),
        ),
        vocab_size=_without_padding(vocab_size),
        # The file's float32 as its shortest decimal: 1e-6, not 9.999999974752427e-07.
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon", 1e-6)))),
    )
