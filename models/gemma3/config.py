"""The five published sizes of Gemma 3 as literals, and configs read from checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GLOBAL_EVERY = 6  # five local layers, then a global one


@dataclass(frozen=True, kw_only=True)
class Gemma3Layer:
    """What differs from layer to layer, in one record: a window and its rotary embedding.

    `sliding_window` counts the query's own token, None is global. Angles are
    `position / rope_factor * rope_theta^(-2i / head_dim)`.
    """

    sliding_window: int | None
    rope_theta: float
    rope_factor: float


@dataclass(frozen=True, kw_only=True)
class Gemma3Config:
    """A text model. `query_scale` multiplies q k: `1 / sqrt(query_pre_attn_scalar)`."""

    embed_dim: int
    mlp_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float
    max_position: int
    layers: tuple[Gemma3Layer, ...]
    vocab_size: int = 262_144
    rms_norm_eps: float = 1e-6

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
    local = Gemma3Layer(sliding_window=sliding_window, rope_theta=local_theta, rope_factor=1.0)
    full = Gemma3Layer(sliding_window=None, rope_theta=global_theta, rope_factor=global_factor)
    return tuple(full if (i + 1) % global_every == 0 else local for i in range(num_layers))


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
    ),
}


class UnsupportedModelError(ValueError):
    """A checkpoint of a model, or with an option, that this implementation does not have."""


_HF_DEFAULTS: dict[str, Any] = {  # transformers', for keys that a config.json leaves out
    "vocab_size": 262_208,
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
    "tie_word_embeddings": (True, None),
}


def from_hf(config_json: dict[str, Any]) -> Gemma3Config:
    """The config of a Hugging Face `config.json`: transformers v4 or v5, text or multimodal.

    The vocabulary of multimodal checkpoints has 64 unused rows (262,208), which are cut off.
    Raises UnsupportedModelError for another model, or an option that would change the result.
    """
    text = config_json.get("text_config", config_json)
    kinds = {config_json.get("model_type"), text.get("model_type", "gemma3_text")}
    if not kinds <= {"gemma3", "gemma3_text"}:
        raise UnsupportedModelError(
            f"model_type is {config_json.get('model_type')!r}, expected 'gemma3' or 'gemma3_text'"
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

    vocab_size = get("vocab_size")
    return Gemma3Config(
        embed_dim=get("hidden_size"),
        mlp_dim=get("intermediate_size"),
        num_q_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads"),
        head_dim=get("head_dim"),
        query_scale=get("query_pre_attn_scalar") ** -0.5,
        max_position=get("max_position_embeddings"),
        layers=_hf_layers(text, get),
        vocab_size=262_144 if vocab_size == 262_208 else vocab_size,
        rms_norm_eps=get("rms_norm_eps"),
    )


def _hf_layers(text: dict[str, Any], get: Callable[[str], Any]) -> tuple[Gemma3Layer, ...]:
    count = get("num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        every = get("sliding_window_pattern")
        types = [
            "full_attention" if (index + 1) % every == 0 else "sliding_attention"
            for index in range(count)
        ]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != count:
        raise UnsupportedModelError(
            f"layer_types has {len(types)} entries for {count} layers, unknown: {sorted(unknown)}"
        )
    rope = text.get("rope_parameters") or {}  # v5: one record for each type of layer
    if "full_attention" not in rope:  # v4: two bases, and a scaling of the global one
        rope = {
            "full_attention": {
                "rope_theta": get("rope_theta"),
                **(text.get("rope_scaling") or {}),
            },
            "sliding_attention": {"rope_theta": get("rope_local_base_freq")},
        }
    kinds = {
        kind: Gemma3Layer(
            sliding_window=None if kind == "full_attention" else get("sliding_window"),
            rope_theta=float(rope[kind]["rope_theta"]),
            rope_factor=_rope_factor(rope[kind]),
        )
        for kind in sorted(set(types))
    }
    return tuple(kinds[kind] for kind in types)


def _rope_factor(record: dict[str, Any]) -> float:
    kind = record.get("rope_type", record.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind == "linear":
        return float(record["factor"])
    raise UnsupportedModelError(f"rope type {kind!r}: only 'default' and 'linear' are implemented")


def from_gguf(metadata: dict[str, Any]) -> Gemma3Config:
    """The config of a GGUF file from its metadata.

    The file holds neither the layer pattern, the local rope base nor the query scale; they are
    the published ones (the scale differs from `1 / sqrt(head_dim)` only in the 62-layer 27B).
    """
    architecture = metadata.get("general.architecture")
    if architecture != "gemma3":
        raise UnsupportedModelError(f"the file holds a {architecture!r} model, expected 'gemma3'")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"gemma3.{name}", default)
        if value is None:
            raise UnsupportedModelError(f"the file's metadata lack 'gemma3.{name}'")
        return value

    if metadata.get("gemma3.final_logit_softcapping"):
        raise UnsupportedModelError("gemma3.final_logit_softcapping: Gemma 3 has no soft cap")
    num_layers, head_dim = int(get("block_count")), int(get("attention.key_length"))
    pre_attention_scalar = 168 if num_layers == 62 else head_dim
    return Gemma3Config(
        embed_dim=int(get("embedding_length")),
        mlp_dim=int(get("feed_forward_length")),
        num_q_heads=int(get("attention.head_count")),
        num_kv_heads=int(get("attention.head_count_kv")),
        head_dim=head_dim,
        query_scale=pre_attention_scalar**-0.5,
        max_position=int(get("context_length")),
        layers=layer_pattern(
            num_layers,
            sliding_window=int(get("attention.sliding_window")),
            global_theta=float(get("rope.freq_base", 1_000_000.0)),
            global_factor=float(get("rope.scaling.factor", 1.0)),
        ),
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        rms_norm_eps=1e-6,
    )
