import json
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3Config as HuggingFaceConfig
from transformers import Gemma3TextConfig as HuggingFaceTextConfig

from jaxattn.models.gemma3.config import (
    CONFIGS,
    PADDED_VOCAB_SIZE,
    VOCAB_SIZE,
    Gemma3Config,
    Gemma3Layer,
    UnsupportedModelError,
    VisionConfig,
    from_gguf,
    from_hf,
)
from jaxattn.models.gemma3.gguf import GGUFFile
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.weights import expected_shapes

# embed, mlp, layers, query heads, kv heads, head dim, window, 1 / scale^2, positions, factor
PUBLISHED = {
    "gemma-3-270m": (640, 2048, 18, 4, 1, 256, 512, 256, 32_768, 1.0),
    "gemma-3-1b": (1152, 6912, 26, 4, 1, 256, 512, 256, 32_768, 1.0),
    "gemma-3-4b": (2560, 10_240, 34, 8, 4, 256, 1024, 256, 131_072, 8.0),
    "gemma-3-12b": (3840, 15_360, 48, 16, 8, 256, 1024, 256, 131_072, 8.0),
    "gemma-3-27b": (5376, 21_504, 62, 32, 16, 128, 1024, 168, 131_072, 8.0),
}
GLOBAL_LAYERS = {
    "gemma-3-270m": [5, 11, 17],
    "gemma-3-1b": [5, 11, 17, 23],
    "gemma-3-4b": [5, 11, 17, 23, 29],
    "gemma-3-12b": [5, 11, 17, 23, 29, 35, 41, 47],
    "gemma-3-27b": [5, 11, 17, 23, 29, 35, 41, 47, 53, 59],
}
PARAMETERS = {  # of the whole checkpoint: vision tower, projector and rows of padding included
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
}
SIZES = sorted(PUBLISHED)
MULTIMODAL = ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b")
VISION_JSON = {  # what the published config.json files hold, all three the same
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}


def text_only(size: str) -> Gemma3Config:
    return replace(CONFIGS[size], vision=None)


def layer_types(size: str) -> list[str]:
    types = ["sliding_attention"] * PUBLISHED[size][2]
    for index in GLOBAL_LAYERS[size]:
        types[index] = "full_attention"
    return types


def text_json(size: str, *keys: str) -> dict[str, Any]:
    """The keys of a transformers config that v4 and v5 share; all of them, or only `keys`."""
    embed, mlp, layers, q_heads, kv_heads, head_dim, window, scalar, positions, _ = PUBLISHED[size]
    shared = {
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": window,
        "query_pre_attn_scalar": scalar,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_208 if size in MULTIMODAL else 262_144,
    }
    return {name: value for name, value in shared.items() if name in keys or not keys}


def v4_text_json(size: str) -> dict[str, Any]:
    """A text-only config.json as transformers v4 writes it."""
    return text_json(size) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0} if size in MULTIMODAL else None,
        "sliding_window_pattern": 6,
    }


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_layer_by_layer(size):
    config = CONFIGS[size]
    embed, mlp, layers, q_heads, kv_heads, head_dim, window, scalar, positions, factor = PUBLISHED[
        size
    ]
    assert (config.embed_dim, config.mlp_dim, config.num_layers) == (embed, mlp, layers)
    heads = config.num_q_heads, config.num_kv_heads, config.head_dim
    assert heads == (q_heads, kv_heads, head_dim)
    assert config.query_scale == scalar**-0.5
    assert config.max_position == positions
    assert (config.vocab_size, config.rms_norm_eps) == (262_144, 1e-6)
    for index, layer in enumerate(config.layers):
        if index in GLOBAL_LAYERS[size]:
            expected = Gemma3Layer(sliding_window=None, rope_theta=1e6, rope_factor=factor)
        else:
            expected = Gemma3Layer(sliding_window=window, rope_theta=1e4, rope_factor=1.0)
        assert layer == expected, index


@pytest.mark.parametrize("size", SIZES)
def test_number_of_parameters(size):
    config = CONFIGS[size]
    padding = PADDED_VOCAB_SIZE - VOCAB_SIZE if size in MULTIMODAL else 0
    assert padding in (0, 64)
    held = sum(map(prod, expected_shapes(config).values()))
    assert held + padding * config.embed_dim == PARAMETERS[size]


@pytest.mark.parametrize("size", SIZES)
def test_transformers_v4_text(size):
    assert from_hf(v4_text_json(size)) == text_only(size)


@pytest.mark.parametrize("size", SIZES)
def test_transformers_v4_with_layer_types(size):
    values = v4_text_json(size) | {"layer_types": layer_types(size), "_sliding_window_pattern": 6}
    del values["sliding_window_pattern"]
    assert from_hf(values) == text_only(size)


# What the published multimodal config.json files hold; the rest are transformers' defaults.
V4_MULTIMODAL_KEYS = {
    "gemma-3-4b": (),
    "gemma-3-12b": ("num_attention_heads", "num_key_value_heads"),
    "gemma-3-27b": (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "query_pre_attn_scalar",
    ),
}


@pytest.mark.parametrize("size", MULTIMODAL)
def test_transformers_v4_multimodal_with_few_keys(size):
    always = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    text = text_json(size, *always, *V4_MULTIMODAL_KEYS[size]) | {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    values = {"model_type": "gemma3", "text_config": text, "vision_config": VISION_JSON}
    assert from_hf(values) == CONFIGS[size]


def v5_rope(size: str) -> dict[str, Any]:
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    if size in MULTIMODAL:
        full |= {"rope_type": "linear", "factor": 8.0}
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


@pytest.mark.parametrize("size", SIZES)
def test_transformers_v5_text(size):
    theirs = HuggingFaceTextConfig(**text_json(size), rope_parameters=v5_rope(size)).to_dict()
    assert theirs["layer_types"] == layer_types(size)
    assert from_hf(json.loads(json.dumps(theirs))) == text_only(size)


@pytest.mark.parametrize("size", MULTIMODAL)
def test_transformers_v5_multimodal(size, tmp_path):
    text = text_json(size) | {"rope_parameters": v5_rope(size)}
    theirs = HuggingFaceConfig(text_config=text, vision_config=VISION_JSON)
    assert from_hf(json.loads(json.dumps(theirs.to_dict()))) == CONFIGS[size]
    theirs.save_pretrained(tmp_path)  # leaves out what is transformers' default
    saved = json.loads((tmp_path / "config.json").read_text())
    assert from_hf(saved) == CONFIGS[size]
    assert from_hf(saved, images=False) == text_only(size)


def test_missing_keys_have_the_defaults_of_transformers():
    ours = from_hf({"model_type": "gemma3_text"})
    assert ours == from_hf(HuggingFaceTextConfig().to_dict())
    assert (ours.embed_dim, ours.num_layers, ours.layers[0].sliding_window) == (2304, 26, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2'"),
        ({"model_type": None}, "model_type=None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "low_freq_factor": 1.0}},
            "low_freq_factor",
        ),
        ({"rope_parameters": {"rope_theta": 1e6}}, "no rope_theta for 'full_attention'"),
        ({"rope_parameters": {"full_attention": {}}}, "no rope_theta for 'full_attention'"),
        ({"layer_types": ["full_attention"]}, "1 entries for 18 layers"),
        ({"layer_types": ["chunked_attention"] * 18}, "chunked_attention"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf(v4_text_json("gemma-3-270m") | changes)


def test_an_option_of_the_text_config_is_refused_too():
    text = v4_text_json("gemma-3-4b") | {"final_logit_softcapping": 30.0}
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping"):
        from_hf({"model_type": "gemma3", "text_config": text})
    text = v4_text_json("gemma-3-4b") | {"model_type": "llama"}
    with pytest.raises(UnsupportedModelError, match="model_type='llama'"):
        from_hf({"model_type": "gemma3", "text_config": text})


def test_scaling_in_both_shapes_is_refused():
    values = v4_text_json("gemma-3-4b") | {"rope_parameters": v5_rope("gemma-3-4b")}
    with pytest.raises(UnsupportedModelError, match="both rope_parameters and rope_scaling"):
        from_hf(values)


def multimodal_json(vision: Any = VISION_JSON, **others: Any) -> dict[str, Any]:
    text = v4_text_json("gemma-3-4b")
    return {"model_type": "gemma3", "text_config": text, "vision_config": vision, **others}


@pytest.mark.parametrize("size", SIZES)
def test_published_vision_towers(size):
    vision = CONFIGS[size].vision
    if size not in MULTIMODAL:
        assert vision is None
        return
    assert (vision.image_size, vision.patch_size, vision.patches_per_side) == (896, 14, 64)
    assert (vision.embed_dim, vision.mlp_dim, vision.num_layers) == (1152, 4304, 27)
    assert (vision.num_heads, vision.layer_norm_eps) == (16, 1e-6)
    assert (vision.tokens_per_image, vision.tokens_per_side) == (256, 16)


def test_keys_that_a_vision_config_leaves_out_have_the_defaults_of_transformers():
    kept = {"vision_use_head": False, "image_size": 256, "model_type": "siglip_vision_model"}
    theirs = HuggingFaceConfig(vision_config=kept).to_dict()
    ours = from_hf(multimodal_json(kept)).vision
    assert ours == from_hf(json.loads(json.dumps(theirs))).vision
    assert (ours.patch_size, ours.embed_dim, ours.num_layers) == (16, 768, 12)


def test_the_usual_image_tokens():
    tokens = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_id": 262_144}
    config = from_hf(multimodal_json(mm_tokens_per_image=64, **tokens))
    assert config.vision == VisionConfig(tokens_per_image=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": [1]}, r"vision_config=\[1\], expected an object"),
        ({"boi_token_index": 5}, "boi_token_index=5; Gemma 3's is 255999"),
        ({"eoi_token_index": 5}, "eoi_token_index=5; Gemma 3's is 256000"),
        ({"image_token_id": 5}, "image_token_id=5; Gemma 3's is 262144"),
        ({"vision_config": VISION_JSON | {"model_type": "clip_vision_model"}}, "model_type of vi"),
        ({"vision_config": VISION_JSON | {"hidden_act": "gelu"}}, "hidden_act of .* is 'gelu'"),
        ({"vision_config": VISION_JSON | {"num_channels": 1}}, "num_channels of .* is 1"),
        ({"vision_config": VISION_JSON | {"vision_use_head": True}}, "vision_use_head of .* True"),
        ({"vision_config": {"hidden_size": 1152}}, "vision_use_head of vision_config is True"),
    ],
)
def test_what_the_tower_lacks_is_refused_by_name(changes, message):
    values = multimodal_json() | changes
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf(values)
    assert from_hf(values, images=False) == text_only("gemma-3-4b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 900}, "image_size=900 is not a multiple of patch_size=14"),
        ({"embed_dim": 1150}, "embed_dim=1150 is not a multiple of num_heads=16"),
        ({"tokens_per_image": 250}, "tokens_per_image=250 is not a square"),
        ({"tokens_per_image": 9}, "64 patches a side cannot be pooled to 3 tokens a side"),
        ({"num_layers": 2000}, "vision num_layers=2000: expected at most 1024"),
        ({"num_heads": 0}, "vision num_heads=0"),
        ({"layer_norm_eps": 0.0}, r"vision layer_norm_eps=0\.0"),
    ],
)
def test_impossible_towers(changes, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig(**changes)


def gguf_metadata(size: str) -> dict[str, Any]:
    embed, mlp, layers, q_heads, kv_heads, head_dim, window, _, positions, factor = PUBLISHED[size]
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.context_length": positions,
        "gemma3.embedding_length": embed,
        "gemma3.feed_forward_length": mlp,
        "gemma3.block_count": layers,
        "gemma3.attention.head_count": q_heads,
        "gemma3.attention.head_count_kv": kv_heads,
        "gemma3.attention.key_length": head_dim,
        "gemma3.attention.value_length": head_dim,
        "gemma3.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "gemma3.attention.sliding_window": window,
        "gemma3.rope.freq_base": 1_000_000.0,
        "gemma3.vocab_size": 262_144,
    }
    if factor != 1:
        metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": factor}
    return metadata


@pytest.mark.parametrize("size", SIZES)
def test_gguf(size):
    assert from_gguf(gguf_metadata(size)) == text_only(size)


@pytest.mark.parametrize("size", SIZES)
def test_gguf_without_a_rope_factor_has_the_published_one(size):
    metadata = {k: v for k, v in gguf_metadata(size).items() if "rope.scaling" not in k}
    assert from_gguf(metadata) == replace(CONFIGS[size], vision=None)
    for given in ({"gemma3.rope.scaling.factor": 1.0}, {"gemma3.rope.scaling.type": "none"}):
        assert {layer.rope_factor for layer in from_gguf(metadata | given).layers} == {1.0}


def test_gguf_of_the_real_270m():
    assert from_gguf(GGUFFile(packaged_gguf()).metadata) == CONFIGS["gemma-3-270m"]


def test_gguf_keys_that_most_files_lack_are_read():
    metadata = gguf_metadata("gemma-3-270m") | {
        "gemma3.attention.sliding_window_pattern": 3,
        "gemma3.attention.scale": 0.125,
        "gemma3.rope.freq_base_swa": 20_000.0,
        "gemma3.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.tokens": ["a"] * 262_208,
    }
    config = from_gguf(metadata)
    assert [i for i, layer in enumerate(config.layers) if layer.sliding_window is None] == [
        2, 5, 8, 11, 14, 17,
    ]  # fmt: skip
    assert config.layers[0].rope_theta == 20_000.0
    assert (config.query_scale, config.rms_norm_eps) == (0.125, 1e-5)
    assert config.vocab_size == 262_144  # 64 rows of padding
    ollama = {"gemma3.rope.local.freq_base": 30_000.0, "gemma3.rope.global.freq_base": 2e6}
    without_base = {k: v for k, v in metadata.items() if "freq_base" not in k}
    thetas = [layer.rope_theta for layer in from_gguf(without_base | ollama).layers[1:3]]
    assert thetas == [30_000.0, 2_000_000.0]
    unscaled = {"gemma3.rope.scaling.type": "none", "gemma3.rope.scaling.factor": 8.0}
    assert from_gguf(gguf_metadata("gemma-3-270m") | unscaled) == CONFIGS["gemma-3-270m"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma2"}, "a 'gemma2' model"),
        ({"gemma3.block_count": None}, r"lack 'gemma3\.block_count'"),
        ({"gemma3.vocab_size": None}, r"lack 'gemma3\.vocab_size'"),
        ({"gemma3.attention.head_count_kv": [1, 2]}, r"head_count_kv=\[1, 2\]"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"gemma3.attention.value_length": 128}, "value_length=128"),
        ({"gemma3.attention.causal": False}, "causal=False"),
        ({"gemma3.rope.dimension_count": 64}, "dimension_count=64"),
        ({"gemma3.rope.scaling.type": "yarn"}, "scaling.type='yarn'"),
        ({"gemma3.final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"gemma3.attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
    ],
)
def test_gguf_refusals(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        from_gguf(gguf_metadata("gemma-3-270m") | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 0}, "embed_dim=0"),
        ({"layers": ()}, "layers is empty"),
        ({"num_q_heads": 3, "num_kv_heads": 2}, "num_q_heads=3"),
    ],
)
def test_impossible_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIGS["gemma-3-270m"], **changes)
