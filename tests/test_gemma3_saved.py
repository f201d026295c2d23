"""Folders of our own: whole or not there, plain Orbax inside, and they hold what was put in."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxattn.cli import main
from jaxattn.models.gemma3 import checkpoint, saved
from jaxattn.models.gemma3.checkpoint import load_config, load_weights
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.errors import CheckpointError, UnsupportedModelError
from jaxattn.models.gemma3.saved import SavedFolder, save_checkpoint
from jaxattn.models.gemma3.sharding import weight_specs
from jaxattn.models.gemma3.tokenizer import load_tokenizer, tokenizer_file
from tests import tiny_vision
from tests.tiny_checkpoints import (
    CONFIG,
    gguf_tensors,
    hf_tensors,
    random_weights,
    write_folder,
    write_gguf,
)

WEIGHTS = random_weights()
TEXT = "in the\n a\u00e9 <start_of_turn> the"


@pytest.fixture
def tiny_gguf(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(WEIGHTS))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint of ours in bfloat16."""
    folder = tmp_path_factory.mktemp("good")
    source = write_gguf(folder / "tiny.gguf", gguf_tensors(WEIGHTS))
    config, weights = load_weights(source, dtype="bfloat16")
    save_checkpoint(folder / "model", config, weights, tokenizer_file(source))
    return folder / "model"


@pytest.fixture
def copy(good, tmp_path) -> Path:
    """To be damaged."""
    return shutil.copytree(good, tmp_path / "damaged")


def assert_same(loaded, expected):
    assert list(loaded) == list(expected)
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype, name
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


# Round trips.


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convert_and_load(tiny_gguf, tmp_path, dtype, quantize, capsys):
    target = tmp_path / "a" / "model"
    flags = ["--dtype", dtype, *(["--quantize", quantize] if quantize else [])]
    assert main(["convert", str(tiny_gguf), str(target), *flags]) == 0
    error = capsys.readouterr().err
    assert "MiB; weights in memory: " in error
    assert f"{target}: " in error
    assert load_config(str(target)) == CONFIG
    expected = load_weights(tiny_gguf, dtype=dtype, quantize=quantize)
    assert_same(load_weights(target, dtype=dtype)[1], expected[1])
    tokenizer = load_tokenizer(target)
    assert tokenizer.encode(TEXT) == load_tokenizer(tiny_gguf).encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special=False) == "<bos>" + TEXT
    assert list(target.parent.iterdir()) == [target]


def test_dtypes_and_quantisation_are_chosen_when_loading(good):
    _, wide = load_weights(good, dtype="float32")
    assert wide["layers.0.q"].dtype == np.float32
    np.testing.assert_array_equal(wide["layers.0.q"], WEIGHTS["layers.0.q"])
    _, small = load_weights(good, dtype="bfloat16", quantize="int8")
    assert small["layers.0.q"].dtype == np.int8
    assert small["layers.0.q.scale"].shape == (CONFIG.num_q_heads * CONFIG.head_dim,)


def test_arrays_are_read_in_blocks(good, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 7 * 64 * 4)
    _, weights = load_weights(good, dtype="float32")
    np.testing.assert_array_equal(weights["embed"], WEIGHTS["embed"])


def test_a_hugging_face_folder_keeps_its_tokenizer(tmp_path, tiny_gguf):
    source = write_folder(tmp_path / "source", hf_tensors(WEIGHTS))
    name, content = tokenizer_file(tiny_gguf)
    (source / name).write_bytes(content)
    assert main(["convert", str(source), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / name).read_bytes() == content
    assert_same(
        load_weights(tmp_path / "model", dtype="bfloat16")[1],
        load_weights(source, dtype="bfloat16")[1],
    )


def test_a_vision_tower_is_kept_and_can_be_left_out(tmp_path, tiny_gguf):
    name = "wide_window"
    source = write_folder(
        tmp_path / "a", tiny_vision.hf_tensors(name), config_json=tiny_vision.CONFIGS[name]
    )
    for quantize in (None, "int8"):
        target = tmp_path / str(quantize)
        config, weights = load_weights(source, dtype="bfloat16", quantize=quantize)
        assert config.vision is not None
        save_checkpoint(target, config, weights, tokenizer_file(tiny_gguf))
        assert load_config(str(target)) == config
        assert_same(load_weights(target, dtype="bfloat16")[1], weights)
        text, alone = load_weights(target, dtype="bfloat16", images=False)
        assert text == replace(config, vision=None)
        expected = load_weights(source, dtype="bfloat16", quantize=quantize, images=False)
        assert_same(alone, expected[1])


def test_the_weights_are_plain_orbax_and_restore_to_shardings(good):
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    specs = weight_specs(CONFIG)
    abstract = {
        name: jax.ShapeDtypeStruct(
            array.shape,
            np.float32 if array.ndim == 1 else ml_dtypes.bfloat16,
            sharding=NamedSharding(mesh, specs[name]),
        )
        for name, array in WEIGHTS.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(good.absolute() / "weights", abstract)
    expected = load_weights(good, dtype="bfloat16")[1]
    gate = restored["layers.3.gate"]
    assert gate.sharding == abstract["layers.3.gate"].sharding
    assert [part.data.shape for part in gate.addressable_shards] == [(64, 64)] * 2
    assert_same({name: np.asarray(restored[name]) for name in expected}, expected)


@pytest.mark.parametrize("size", sorted(CONFIGS))
def test_configs_survive_json(size, tmp_path):
    config = CONFIGS[size]
    path = tmp_path / "jaxattn.json"
    stored = json.loads(json.dumps(saved.asdict(config)))
    assert saved._config(path, stored) == config
    odd = replace(config, query_scale=1 / 3, rms_norm_eps=1e-7)
    assert saved._config(path, json.loads(json.dumps(saved.asdict(odd)))) == odd


# Whole or not there.


def test_an_existing_folder_is_replaced_only_if_asked_and_ours(tiny_gguf, tmp_path, capsys):
    target = tmp_path / "model"
    arguments = ["convert", str(tiny_gguf), str(target)]
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    for flags, message in (([], "exists: give another name, or --force"), (["--force"], "is no")):
        assert main([*arguments, *flags]) == 1
        assert message in capsys.readouterr().err
    assert (target / "thesis.tex").read_text() == "years of work"
    shutil.rmtree(target)
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "--force to replace it" in capsys.readouterr().err
    assert main([*arguments, "--quantize", "int8", "--force"]) == 0
    assert SavedFolder(target).quantize == "int8"
    assert sorted(tmp_path.iterdir()) == [target, tiny_gguf]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("at", ["_sizes", "_write"])
def test_an_interrupted_save_leaves_what_was_there(good, copy, monkeypatch, at, error):
    config, weights = load_weights(good, dtype="float32")
    before = sorted(copy.parent.iterdir())

    def fail(*args):
        raise error

    monkeypatch.setattr(saved, at, fail)
    for target, force in ((copy, True), (copy.parent / "other", False)):
        with pytest.raises(type(error) if isinstance(error, OSError) else error):
            save_checkpoint(target, config, weights, ("tokenizer.model", b""), force=force)
    monkeypatch.undo()
    assert sorted(copy.parent.iterdir()) == before
    assert_same(load_weights(copy, dtype="float32")[1], weights)


def test_a_folder_whose_writing_was_killed_is_no_checkpoint(copy):
    """The description is written last."""
    (copy / "jaxattn.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_weights(copy, dtype="float32")


# Damage.


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def change(folder: Path, **entries) -> None:
    path = folder / "jaxattn.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_every_file_is_missed_and_measured(copy):
    files = [path for path in copy.rglob("*") if path.is_file() and path.name != "jaxattn.json"]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        name = path.relative_to(copy).as_posix()
        path.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=f"{name} has {len(content) - 1} bytes, not"):
            load_weights(copy, dtype="float32")
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            load_weights(copy, dtype="float32")
        path.write_bytes(content)
    load_weights(copy, dtype="float32")


def test_garbage_of_the_right_size(copy):
    path = largest(copy / "weights")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"damaged: "):
        load_weights(copy, dtype="float32")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"version": 2}, "has version 2; only 1 can be read"),
        ({"quantize": "int4"}, "lacks, or has more than"),
        ({"more": 1}, "lacks, or has more than"),
        ({"files": []}, "lacks, or has more than"),
        ({"quantize": "int8"}, r"missing: embed\.scale"),
        ({"config": {}}, "describes no possible model"),
        ({"config": None}, "describes no possible model"),
    ],
)
def test_descriptions_that_do_not_fit(copy, entries, message):
    change(copy, **entries)
    with pytest.raises(CheckpointError, match=message):
        load_weights(copy, dtype="float32")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embed_dim", "64", "describes no possible model"),
        ("embed_dim", 0, "embed_dim=0"),
        ("soft_cap", 30.0, "missing or unknown entries"),
        ("embed_dim", 32, r"wrong shape: embed is \(300, 64\), expected \(300, 32\)"),
    ],
)
def test_configs_that_do_not_fit(copy, key, value, message):
    config = json.loads((copy / "jaxattn.json").read_text())["config"]
    change(copy, config=config | {key: value})
    with pytest.raises(CheckpointError, match=message):
        load_weights(copy, dtype="float32")


def test_a_default_that_is_left_out_is_not_guessed(copy):
    config = json.loads((copy / "jaxattn.json").read_text())["config"]
    del config["rms_norm_eps"]
    change(copy, config=config)
    with pytest.raises(CheckpointError, match="missing or unknown entries"):
        load_weights(copy, dtype="float32")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_description_that_is_no_object(copy, text):
    (copy / "jaxattn.json").write_text(text)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"jaxattn\.json"):
        load_weights(copy, dtype="float32")


def test_arrays_of_other_types_and_values(good, tmp_path):
    config, weights = load_weights(good, dtype="float32")
    tokenizer = tokenizer_file(good)
    wrong = weights | {"layers.0.q": weights["layers.0.q"].astype(np.int32)}
    save_checkpoint(tmp_path / "a", config, wrong, tokenizer)
    with pytest.raises(CheckpointError, match=r"layers\.0\.q \(int32\): weights are read from"):
        load_weights(tmp_path / "a", dtype="float32")
    weights["layers.2.down"][3, 4] = np.nan
    save_checkpoint(tmp_path / "b", config, weights, tokenizer)
    with pytest.raises(CheckpointError, match=r"NaN or infinity in layers\.2\.down"):
        load_weights(tmp_path / "b", dtype="float32")
