"""Tiny random text-only Gemma 3 models as Hugging Face has them: configs, tensors, prompts.

Needs numpy alone: `reference_transformers.py` runs it where torch is and JAX is not.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_vision import VOCAB, draw_tensors, text_shapes

DATA = Path(__file__).parent / "data" / "gemma3_text"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_GLOBAL_EVERY = 6


def _config_json(*, num_hidden_layers: int, global_rope: dict[str, Any], **text: Any) -> dict:
    return {
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "num_hidden_layers": num_hidden_layers,
        "layer_types": [
            _LOCAL if (index + 1) % _GLOBAL_EVERY else _GLOBAL for index in range(num_hidden_layers)
        ],
        "rope_parameters": {
            _GLOBAL: {"rope_theta": 1_000_000.0, **global_rope},
            _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **text,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    # as 270M and 1B: one kv head, no factor
    "one_kv_head": _config_json(
        num_hidden_layers=7,
        global_rope={"rope_type": "default"},
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
    ),
    # as 27B: the query scale is hidden_size / num_attention_heads, not head_dim; a factor of 8
    "own_scale": _config_json(
        num_hidden_layers=7,
        global_rope={"rope_type": "linear", "factor": 8.0},
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=6,
        sliding_window=5,
    ),
}


def hf_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny model."""
    return draw_tensors(text_shapes(CONFIGS[name], "model."), sum(map(ord, name)))


def prompt(name: str) -> np.ndarray:
    """Token ids, longer than four windows."""
    draw = np.random.RandomState(7)
    return draw.randint(3, VOCAB, 4 * CONFIGS[name]["sliding_window"] + 3).astype(np.int32)
