"""Tiny random multimodal Gemma 3 models as Hugging Face has them: configs, tensors, prompts.

Needs numpy alone: `reference_transformers.py` runs it where torch is and JAX is not.
"""

from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "gemma3_vision"
IMAGE = 262_144  # the token that an image's embeddings replace; not in the tiny vocabulary
VOCAB = 64
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _config_json(
    *,
    text: dict[str, Any],
    vision: dict[str, Any],
    tokens_per_image: int,
) -> dict[str, Any]:
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
    return {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "num_hidden_layers": len(text["layer_types"]),
            "rope_parameters": {
                _GLOBAL: rope,
                _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
            },
            **text,
        },
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
        "mm_tokens_per_image": tokens_per_image,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    # 16 patches, four to a token; the window is wider than an image
    "wide_window": _config_json(
        text={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
        },
        vision={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        tokens_per_image=4,
    ),
    # 64 patches, four to a token; the window of 5 is narrower than an image of 16 tokens
    "narrow_window": _config_json(
        text={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 6,
            "sliding_window": 5,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL, _LOCAL],
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 40,
            "patch_size": 5,
        },
        tokens_per_image=16,
    ),
    # 81 patches, nine to a token; every layer global
    "global_only": _config_json(
        text={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "layer_types": [_GLOBAL, _GLOBAL],
        },
        vision={
            "hidden_size": 36,
            "intermediate_size": 30,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 36,
            "patch_size": 4,
            "layer_norm_eps": 1e-5,
        },
        tokens_per_image=9,
    ),
}
CASES = tuple((name, images) for name in CONFIGS for images in (1, 2))


def text_shapes(text: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Names (as of transformers 5) and shapes of a text model's tensors, without the tied head."""
    embed, mlp, head = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    queries, keys = head * text["num_attention_heads"], head * text["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (text["vocab_size"], embed),
        f"{prefix}norm.weight": (embed,),
    }
    for index in range(text["num_hidden_layers"]):
        shapes |= {
            f"{prefix}layers.{index}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (embed,),
                "self_attn.q_proj": (queries, embed),
                "self_attn.k_proj": (keys, embed),
                "self_attn.v_proj": (keys, embed),
                "self_attn.o_proj": (embed, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "post_attention_layernorm": (embed,),
                "pre_feedforward_layernorm": (embed,),
                "mlp.gate_proj": (mlp, embed),
                "mlp.up_proj": (mlp, embed),
                "mlp.down_proj": (embed, mlp),
                "post_feedforward_layernorm": (embed,),
            }.items()
        }
    return shapes


def hf_shapes(config_json: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same of a multimodal model."""
    text, vision = config_json["text_config"], config_json["vision_config"]
    embed = text["hidden_size"]
    shapes = text_shapes(text, "model.language_model.")
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower = "model.vision_tower."
    shapes |= {
        f"{tower}embeddings.patch_embedding.weight": (width, 3, patch, patch),
        f"{tower}embeddings.patch_embedding.bias": (width,),
        f"{tower}embeddings.position_embedding.weight": (
            (vision["image_size"] // patch) ** 2,
            width,
        ),
    }
    linear = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
        "self_attn.out_proj": (width, width),
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, inner),
        "layer_norm1": (width,),
        "layer_norm2": (width,),
    }
    for index in range(vision["num_hidden_layers"]):
        for name, shape in linear.items():
            shapes[f"{tower}encoder.layers.{index}.{name}.weight"] = shape
            shapes[f"{tower}encoder.layers.{index}.{name}.bias"] = shape[:1]
    return shapes | {
        f"{tower}post_layernorm.weight": (width,),
        f"{tower}post_layernorm.bias": (width,),
        "model.multi_modal_projector.mm_soft_emb_norm.weight": (width,),
        "model.multi_modal_projector.mm_input_projection_weight": (width, embed),
    }


def draw_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Random tensors, float32. `RandomState`: its numbers never change.

    The embedding is small and the last gain large, so that the context decides: otherwise so few
    layers say the last token again, for ever.
    """
    draw = np.random.RandomState(seed)
    tensors = {}
    for tensor, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else np.prod(shape[1:]) ** -0.5
        values = scale * draw.standard_normal(shape)
        if "layer_norm" in tensor or "post_layernorm.weight" in tensor:
            values += tensor.endswith(".weight")  # a gain, not 1 + w
        if tensor.endswith("embed_tokens.weight"):
            values *= 0.2
        if tensor.endswith(".norm.weight"):
            values += 4
        tensors[tensor] = values.astype(np.float32)
    return tensors


def hf_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny model."""
    return draw_tensors(hf_shapes(CONFIGS[name]), sum(map(ord, name)))


def greedy_count(text: dict[str, Any]) -> int:
    """How many new tokens the references hold: more than three windows."""
    return 3 * text["sliding_window"] + 8


def pixels(name: str, images: int) -> np.ndarray:
    """Random pictures `[images, height, width, 3]`, in bytes."""
    size = CONFIGS[name]["vision_config"]["image_size"]
    draw = np.random.RandomState(images)
    return draw.randint(0, 256, (images, size, size, 3)).astype(np.uint8)


def prompt(name: str, images: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Token ids, `IMAGE` at each image token, and start and end of each image."""
    draw = np.random.RandomState(7)
    ids, spans = draw.randint(3, VOCAB, 6).tolist(), []
    for _ in range(images):
        start = len(ids)
        ids += [IMAGE] * CONFIGS[name]["mm_tokens_per_image"]
        spans.append((start, len(ids)))
        ids += draw.randint(3, VOCAB, 5).tolist()
    return np.array(ids, np.int32), spans
