"""What GGUF files and Hugging Face folders call the weights, and how they store them."""

from dataclasses import dataclass, field

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.weights import Quantization


@dataclass(frozen=True)
class Turned:
    """A tensor that a file stores with its axes in another order than `weight_table`."""

    stored: tuple[int, ...]  # its shape there
    axes: tuple[int, ...]  # to be transposed so, then reshaped


@dataclass(frozen=True)
class Names:
    """A file's names for the canonical ones, and how it stores what it names."""

    of: dict[str, str]
    norm_offset: float  # 1 where the file stores 1 + w
    turned: dict[str, Turned] = field(default_factory=dict)
    quantize: Quantization | None = None


def gguf_names(config: Gemma3Config) -> dict[str, str]:
    layer = {
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "post_attn_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    }
    names = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
    for index in range(config.num_layers):
        names |= {
            f"layers.{index}.{ours}": f"blk.{index}.{theirs}.weight"
            for ours, theirs in layer.items()
        }
    return names


def huggingface_names(config: Gemma3Config, prefix: str) -> dict[str, str]:
    layer = {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    names = {"embed": f"{prefix}embed_tokens.weight", "final_norm": f"{prefix}norm.weight"}
    for index in range(config.num_layers):
        names |= {
            f"layers.{index}.{ours}": f"{prefix}layers.{index}.{theirs}.weight"
            for ours, theirs in layer.items()
        }
    return names


def vision_names(config: Gemma3Config, tower: str, projector: str) -> dict[str, str]:
    if config.vision is None:
        return {}
    modules = {
        "patch": "embeddings.patch_embedding",
        "final_norm": "post_layernorm",
    }
    layer = {
        "attn_norm": "layer_norm1",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }
    for index in range(config.vision.num_layers):
        modules |= {
            f"layers.{index}.{ours}": f"encoder.layers.{index}.{theirs}"
            for ours, theirs in layer.items()
        }
    names = {f"vision.{ours}": f"{tower}{theirs}.weight" for ours, theirs in modules.items()}
    names |= {f"vision.{ours}_bias": f"{tower}{theirs}.bias" for ours, theirs in modules.items()}
    return names | {
        "vision.positions": f"{tower}embeddings.position_embedding.weight",
        "projector.norm": f"{projector}mm_soft_emb_norm.weight",
        "projector.out": f"{projector}mm_input_projection_weight",
    }


def turned_vision(config: Gemma3Config) -> dict[str, Turned]:
    """The convolution over patches is `[out, 3, height, width]`, the projection `[in, out]`."""
    if config.vision is None:
        return {}
    vision = config.vision
    patch = (vision.embed_dim, 3, vision.patch_size, vision.patch_size)
    return {
        "vision.patch": Turned(patch, (0, 2, 3, 1)),
        "projector.out": Turned((vision.embed_dim, config.embed_dim), (1, 0)),
    }
