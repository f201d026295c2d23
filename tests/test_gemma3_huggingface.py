"""Damaged Hugging Face folders: one clear error, whatever the damage."""

import json
from copy import deepcopy

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.errors import CheckpointError
from tests import tiny_vision
from tests.tiny_checkpoints import CONFIG, CONFIG_JSON, hf_tensors, random_weights, write_folder

WEIGHTS = random_weights()
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBERS = st.sampled_from([0, -1, 2**31, 10**30, 0.5, float("nan"), float("inf")])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "linear", "full_attention"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("rope_theta"), inner),
    max_leaves=4,
)
KEYS = [
    *CONFIG_JSON,
    "layer_types", "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq",
    "rms_norm_eps", "sliding_window_pattern", "text_config", "tie_word_embeddings",
    "quantization_config",
]  # fmt: skip

MULTIMODAL = tiny_vision.CONFIGS["wide_window"]
VISION_CONFIG = MULTIMODAL["vision_config"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "damaged", hf_tensors(WEIGHTS))


def load_or_refuse(folder) -> bool:
    """Whether a folder loads. Any error but CheckpointError fails the test."""
    try:
        load_weights(folder, dtype="float32")
    except CheckpointError as error:
        assert "damaged" in str(error)
        return False
    return True


@FUZZ
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
def test_any_value_in_the_config(folder, changes):
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | changes))
    load_or_refuse(folder)


@FUZZ
@given(
    st.dictionaries(st.sampled_from([*VISION_CONFIG, "hidden_act"]), VALUES, max_size=2),
    st.none() | VALUES,
)
def test_any_value_in_the_vision_config(folder, changes, tokens):
    config_json = MULTIMODAL | {"vision_config": VISION_CONFIG | changes}
    config_json |= {} if tokens is None else {"mm_tokens_per_image": tokens}
    (folder / "config.json").write_text(json.dumps(config_json))
    load_or_refuse(folder)  # the folder has no tower, so that nothing loads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_layers=1000000000000: expected at most 1024"),
        ({"num_hidden_layers": "7"}, "num_layers='7': expected a Python int"),
        ({"head_dim": 33}, "head_dim=33 is odd"),
        ({"query_pre_attn_scalar": 0}, "no possible model"),
        ({"query_pre_attn_scalar": -4}, "query_scale="),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"rope_theta": 0}, r"rope_theta=0\.0"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] has no rope_theta"),
        ({"text_config": [1]}, r"text_config=\[1\], expected an object"),
    ],
)
def test_values_of_no_possible_model(folder, changes, message):
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | changes))
    with pytest.raises(CheckpointError, match=f"damaged.*{message}"):
        load_weights(folder, dtype="float32")


def test_json_that_is_too_deep(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_weights(folder, dtype="float32")


def test_cut_anywhere(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = {*range(0, header, 401), *range(12), header - 1, header, header + 1}
    cuts |= {*range(header, len(whole), 30_011), len(whole) - 1}
    for cut in sorted(cuts):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
            load_weights(folder, dtype="float32")
    file.write_bytes(whole)
    assert load_or_refuse(folder)


@FUZZ
@given(st.integers(0, 2**32), st.integers(0, 255))
def test_one_changed_byte(folder, place, value):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    damaged[place % header if place % 4 else place % len(whole)] = value
    file.write_bytes(damaged)
    load_or_refuse(folder)
    file.write_bytes(whole)


def test_shards_in_a_folder_of_their_own(tmp_path):
    folder = write_folder(tmp_path / "a", hf_tensors(WEIGHTS), shards=2)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    moved = deepcopy(listed)
    (folder / "shards").mkdir()
    for tensor, name in listed["weight_map"].items():
        if (folder / name).exists():
            (folder / name).rename(folder / "shards" / name)
        moved["weight_map"][tensor] = f"shards/{name}"
    index.write_text(json.dumps(moved))
    assert load_weights(folder, dtype="float32")[0] == CONFIG
