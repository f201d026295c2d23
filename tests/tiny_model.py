"""A tiny random Gemma 3 with its own vocabulary: in memory, and as a real GGUF file."""

from pathlib import Path

import gguf
import jax
import numpy as np

from jaxattn.engine.engine import Engine
from jaxattn.models.gemma3.config import Gemma3Config, layer_pattern
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import random_weights

WINDOW = 8
VOCAB = 300
MAX_POSITION = 4096
NUM_TENSORS = 2 + 2 * 13
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MERGES = ["th", "\u2581a", "in", "the", "\u2581the", "he", "er", "on", "an", "re"]


def config(num_layers: int = 2) -> Gemma3Config:
    """Local, global, local, ... with a window of 8 tokens."""
    return Gemma3Config(
        embed_dim=32,
        mlp_dim=48,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        query_scale=0.25,
        max_position=MAX_POSITION,
        layers=layer_pattern(num_layers, sliding_window=WINDOW, global_every=2),
        vocab_size=VOCAB,
    )


def weights(num_layers: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    """Random, with a small embedding and a large gain, so that the context decides."""
    arrays = random_weights(config(num_layers), jax.random.key(seed), scale=0.3)
    return arrays | {"embed": 0.1 * arrays["embed"], "final_norm": 12 + arrays["final_norm"]}


def model(num_layers: int = 2, seed: int = 0) -> Gemma3:
    return Gemma3(config(num_layers), weights(num_layers, seed))


def engine(tiny: Gemma3 | None = None, **options) -> Engine:
    defaults = dict(
        eos_ids=(),
        kv_dtype="float32",
        page_size=3,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        backend="xla",
    )
    return Engine(tiny or model(), **defaults | options)


class PlainText:
    """A text stream without a tokenizer: token 65 is "A", and so on."""

    def step(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types. Control tokens and the newline have Gemma 3's ids."""
    fixed = {
        0: ("<pad>", _CONTROL),
        1: ("<eos>", _CONTROL),
        2: ("<bos>", _CONTROL),
        3: ("<unk>", _UNKNOWN),
        105: ("<start_of_turn>", _CONTROL),
        106: ("<end_of_turn>", _CONTROL),
        107: ("\n", _USER_DEFINED),
    }
    letters = ["\u2581", *map(chr, range(ord("a"), ord("z") + 1))]
    others = [(f"<0x{byte:02X}>", _BYTE, 0.0) for byte in range(256)]
    others += [(piece, _NORMAL, -1000.0 - rank) for rank, piece in enumerate(letters)]
    others += [(piece, _NORMAL, -1.0 - rank) for rank, piece in enumerate(_MERGES)]
    rest = iter(others)
    rows = [
        (*fixed[token], 0.0) if token in fixed else next(rest)
        for token in range(len(fixed) + len(others))
    ]
    assert len(rows) == VOCAB
    pieces, types, scores = zip(*rows, strict=True)
    return list(pieces), list(scores), list(types)


def write_gguf(path: Path, num_layers: int = 2, seed: int = 0) -> Path:
    """The model as a GGUF file: float32, norms as 1 + w, SentencePiece vocabulary."""
    shape = config(num_layers)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.embed_dim)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.mlp_dim)
    writer.add_head_count(shape.num_q_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_sliding_window(WINDOW)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    pieces, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    names = {"embed": "token_embd", "final_norm": "output_norm"}
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
    for index in range(num_layers):
        names |= {f"layers.{index}.{ours}": f"blk.{index}.{its}" for ours, its in layer.items()}
    for name, array in weights(num_layers, seed).items():
        stored = np.asarray(array) + np.float32(1 if array.ndim == 1 else 0)
        writer.add_tensor(f"{names[name]}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
