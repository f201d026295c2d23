"""A tiny random Gemma 3 in every form that a checkpoint may have, to be damaged by tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import save_file

from jaxattn.models.gemma3.config import Gemma3Config, layer_pattern
from jaxattn.models.gemma3.weights import expected_shapes
from tests.tiny_model import vocabulary

VOCAB = len(vocabulary()[0])
CONFIG = Gemma3Config(
    embed_dim=64,
    mlp_dim=128,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=32,
    query_scale=32**-0.5,
    max_position=256,
    layers=layer_pattern(7, sliding_window=8),
    vocab_size=VOCAB,
)
CONFIG_JSON: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "max_position_embeddings": 256,
}
# ours, GGUF's, Hugging Face's
LAYER_NAMES = (
    ("attn_norm", "attn_norm", "input_layernorm"),
    ("q", "attn_q", "self_attn.q_proj"),
    ("k", "attn_k", "self_attn.k_proj"),
    ("v", "attn_v", "self_attn.v_proj"),
    ("o", "attn_output", "self_attn.o_proj"),
    ("q_norm", "attn_q_norm", "self_attn.q_norm"),
    ("k_norm", "attn_k_norm", "self_attn.k_norm"),
    ("post_attn_norm", "post_attention_norm", "post_attention_layernorm"),
    ("mlp_norm", "ffn_norm", "pre_feedforward_layernorm"),
    ("gate", "ffn_gate", "mlp.gate_proj"),
    ("up", "ffn_up", "mlp.up_proj"),
    ("down", "ffn_down", "mlp.down_proj"),
    ("post_mlp_norm", "post_ffw_norm", "post_feedforward_layernorm"),
)
Tensors = dict[str, np.ndarray]


def random_weights(config: Gemma3Config = CONFIG, seed: int = 0) -> Tensors:
    """Canonical weights; all are bfloat16 numbers, so that every plain type holds them exactly."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in expected_shapes(config).items()
    }


def gguf_tensors(weights: Mapping[str, np.ndarray]) -> Tensors:
    """By GGUF's names; norms hold 1 + w."""
    names = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
    for index in range(CONFIG.num_layers):
        names |= {f"layers.{index}.{ours}": f"blk.{index}.{g}.weight" for ours, g, _ in LAYER_NAMES}
    return {
        names[name]: array + np.float32(1) if array.ndim == 1 else array
        for name, array in weights.items()
    }


def hf_tensors(weights: Mapping[str, np.ndarray], prefix: str = "model.") -> Tensors:
    """By Hugging Face's names."""
    names = {"embed": f"{prefix}embed_tokens.weight", "final_norm": f"{prefix}norm.weight"}
    for index in range(CONFIG.num_layers):
        names |= {
            f"layers.{index}.{ours}": f"{prefix}layers.{index}.{hf}.weight"
            for ours, _, hf in LAYER_NAMES
        }
    return {names[name]: array for name, array in weights.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, int] | None = None,
    pieces: tuple[list[str], list[float], list[int]] | None = None,
) -> Path:
    """Matrices are stored as `kind`, integer arrays as they are, vectors in float32."""
    writer = GGUFWriter(path, "gemma3")
    sizes = {
        "context_length": CONFIG.max_position,
        "embedding_length": CONFIG.embed_dim,
        "block_count": CONFIG.num_layers,
        "feed_forward_length": CONFIG.mlp_dim,
        "attention.head_count": CONFIG.num_q_heads,
        "attention.head_count_kv": CONFIG.num_kv_heads,
        "attention.key_length": CONFIG.head_dim,
        "attention.value_length": CONFIG.head_dim,
        "attention.sliding_window": 8,
    }
    sizes = {f"gemma3.{key}": value for key, value in sizes.items()}
    for key, value in (sizes | dict(metadata or {})).items():
        writer.add_uint32(key, value)
    texts, scores, types = pieces or vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for name, array in tensors.items():
        if array.ndim == 1 or array.dtype != np.float32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    config_json: Mapping[str, Any] = CONFIG_JSON,
    dtype: Any = ml_dtypes.bfloat16,
    shards: int = 1,
) -> Path:
    """config.json and one safetensors file, or an index and several. Keeps integer arrays."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    stored = {
        name: array.astype(dtype) if array.dtype == np.float32 else array
        for name, array in tensors.items()
    }
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = sorted(stored)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: stored[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
