"""`jaxattn plan --target`: what fits a slice, how it is shared, the bound, and a compile."""

import importlib.util
from dataclasses import replace

import pytest

from jaxattn.cli import main
from jaxattn.engine.ahead import Compiled, CompilerError, LibtpuMissingError, compile_ahead
from jaxattn.engine.devices import CACHE_SHARE
from jaxattn.engine.slices import SLICES, slice_of
from jaxattn.engine.target_plan import (
    DoesNotFitError,
    TargetPlan,
    Wanted,
    plan_target,
    weight_bytes,
)
from jaxattn.kernels.pallas.tiles import CHIPS
from jaxattn.models.gemma3.config import Gemma3Config, layer_pattern
from jaxattn.registry import UnsupportedAttentionError
from tests.test_gemma3_tokenizer import json_library
from tests.tiny_checkpoints import CONFIG_JSON, hf_tensors, random_weights, write_folder

WANTED = Wanted(model="gemma-3-27b", max_len=32768, batch=8)
COMPILED = Compiled(case="step", argument_bytes=10**9, output_bytes=300, alias_bytes=200)


def test_slices():
    assert {each.chip for each in SLICES.values()} == set(CHIPS)
    v5e = slice_of("v5e-8")
    assert (v5e.num_devices, v5e.topology.name) == (8, "v5e:2x4")
    assert v5e.target.device_kind == "TPU v5 lite"
    assert v5e.hbm_bytes < 16 * 2**30
    # Two devices a chip, and cores in the name: 8 is four chips either way.
    assert [slice_of(name).num_devices for name in ("v5p-8", "tpu7x-8")] == [4, 8]
    for each in SLICES.values():  # what the tiles assume of the chip is near
        assert 0.9 < CHIPS[each.chip].hbm_gb_per_s / each.hbm_gb_per_s < 1.1 or each.chip == "v5p"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-16", "'v5e-16': a process drives the chips of one host, of v5e v5e-1, v5e-4, v5e-8"),
        ("h100", "target 'h100': v5e-1, v5e-4, v5e-8, v5p-2, v5p-8, v6e-1, v6e-4, v6e-8, tpu7x-2"),
        ("v5e", "target 'v5e': .*v5e-1, v5e-4, v5e-8$"),
    ],
)
def test_other_slices(name, message):
    with pytest.raises(ValueError, match=message):
        slice_of(name)


def test_weights_are_counted_as_they_are_stored():
    words, width = 262_144, 5376
    attention = 2 * 4096 * width + 2 * 2048 * width  # q and o, k and v
    matrices = words * width + 62 * (attention + 3 * 21_504 * width)
    norms = 62 * (4 * width + 2 * 128) + width

    def weights(wanted, size):
        return sum(weight_bytes(wanted, size).values())

    text = replace(WANTED, images=False)
    assert weights(text, 1) == 2 * matrices + 4 * norms
    assert weights(text, 8) == 2 * matrices // 8 + 4 * norms
    one = replace(WANTED, model="gemma-3-1b")
    repeated = 2 * 26 * 2 * 256 * 1152  # k and v of the one head, whole on every chip
    assert 4 * weights(one, 4) - weights(one, 1) == 3 * (
        repeated + 4 * (26 * (4 * 1152 + 2 * 256) + 1152)
    )


@pytest.mark.parametrize(
    ("model", "target", "tensor", "data"),
    [
        ("gemma-3-1b", "v5e-8", 1, 8),
        ("gemma-3-12b", "v5e-8", 4, 2),
        ("gemma-3-27b", "v5e-8", 8, 1),
        ("gemma-3-27b", "v6e-8", 4, 2),
        ("gemma-3-12b", "v6e-1", 1, 1),  # two of the eight sequences fit: no chip is left to add
    ],
)
def test_a_replica_has_the_fewest_devices_that_hold_the_batch(model, target, tensor, data):
    plan = plan_target(replace(WANTED, model=model), target)
    assert (plan.tensor_parallel, plan.data_parallel) == (tensor, data)
    where, taken = plan.slice, plan.weight_bytes + sum(map(plan.pool_bytes, range(2)))
    assert taken <= where.hbm_bytes - (1 - CACHE_SHARE) * (where.hbm_bytes - plan.weight_bytes)
    for smaller in range(1, tensor):
        if tensor % smaller == 0:
            try:
                less = plan_target(plan.wanted, target, tensor_parallel=smaller)
            except DoesNotFitError:
                continue
            assert less.sequences(32768) < 8
    assert plan.sequences(32768) == (2 if target == "v6e-1" else 8)


def test_shares_that_are_asked_for():
    one = replace(WANTED, model="gemma-3-1b")
    for asked in ({"tensor_parallel": 4}, {"data_parallel": 2}):
        plan = plan_target(one, "v5e-8", **asked)
        assert (plan.tensor_parallel, plan.data_parallel) == (4, 2)
    with pytest.raises(ValueError, match="tensor_parallel=2, data_parallel=2: v5e-8 has 8 devices"):
        plan_target(one, "v5e-8", tensor_parallel=2, data_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel=0: expected at least 1"):
        plan_target(one, "v5e-8", tensor_parallel=0)
    with pytest.raises(ValueError, match=r"4 query heads .* use tensor_parallel=4 with data_par"):
        plan_target(one, "v5e-8", tensor_parallel=8)
    with pytest.raises(UnsupportedAttentionError, match="float8"):
        plan_target(replace(one, kv_dtype="float8_e5m2"), "v5e-8")


@pytest.mark.parametrize(
    ("wanted", "target", "message"),
    [
        (
            WANTED,
            "v5e-1",
            r"gemma-3-27b in bfloat16 needs 51\.10 GiB for its weights; a chip of v5e-1 has "
            r"15\.75 GiB: use --target v5e-4, v5e-8, v5p-2",
        ),
        (
            replace(WANTED, model="gemma-3-12b", max_len=131072),
            "v6e-1",
            r"needs 22\.70 GiB for its weights, and 8\.\d+ GiB for the cache of one sequence of "
            r"131,072 tokens; .*a cache gets 7\.68 GiB: use .*v5e-8.*, or a smaller --max-len",
        ),
        (
            replace(WANTED, model="gemma-3-12b", max_len=120_000),
            "v6e-1",
            "or --quantize int8, or --no-images, or a smaller --max-len",
        ),
        (replace(WANTED, dtype="float32"), "v5e-1", "use --target v5e-8, v5p-8, v6e-4, v6e-8, tpu"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_compiled(wanted, target, message):
    with pytest.raises(DoesNotFitError, match=message):
        plan_target(wanted, target)


def test_a_share_that_is_too_small_is_blamed_on_what_asks_for_it():
    for asked in ({"tensor_parallel": 1}, {"data_parallel": 8}):
        with pytest.raises(DoesNotFitError, match="leave out --tensor-parallel and --data-para"):
            plan_target(WANTED, "v5e-8", **asked)


def test_a_converted_checkpoint_is_counted_as_it_is_stored(tmp_path):
    tensors = hf_tensors(random_weights(TINY))
    folder = write_folder(tmp_path / "tiny", tensors, config_json=TINY_JSON)
    (folder / "tokenizer.json").write_bytes(json_library().to_str().encode())
    assert main(["convert", str(folder), str(tmp_path / "int8"), "--quantize", "int8"]) == 0
    one, asked = (
        Wanted(model=str(path), max_len=256, batch=4, prefill_tokens=32, **options)
        for path, options in ((tmp_path / "int8", {}), (folder, {"quantize": "int8"}))
    )
    assert weight_bytes(one, 1) == weight_bytes(asked, 1)
    assert one.quantization == "int8"


def test_the_bound_by_hand():
    """4B on one v6e: 5 global layers of 34, four heads of 256, K and V in bfloat16."""
    plan = plan_target(replace(WANTED, model="gemma-3-4b", images=False), "v6e-1")
    token = 2 * 4 * 256 * 2
    visible = 8 * token * (5 * 32768 + 29 * 1024)
    assert [len(group.layers) for group in plan.cache.groups] == [29, 5]
    seconds = (plan.weight_bytes + visible) / 1640e9
    assert plan.decode_seconds(32768) == pytest.approx(seconds)
    assert plan.most_tokens_per_s(32768) == pytest.approx(8 / seconds)
    shared = plan_target(plan.wanted, "v6e-8", tensor_parallel=8)  # each kv head on two chips
    assert shared.decode_seconds(32768) == pytest.approx(
        (shared.weight_bytes + 2 * visible / 8) / 1640e9
    )


def test_the_vision_tower_is_counted_and_does_not_decode():
    """SigLIP with 27 layers of 1152, its projector to 5376: whole on every chip."""
    layer = 4 * 1152 * 1152 + 2 * 1152 * 4304
    matrices = 27 * layer + 1152 * 588 + 4096 * 1152 + 5376 * 1152
    wide = 27 * (4 * 1152 + 4 * 1152 + 4304 + 1152) + 1152 + 2 * 1152 + 1152
    plan = plan_target(WANTED, "v5e-8")
    assert plan.tower_bytes == 2 * matrices + 4 * wide
    text = plan_target(replace(WANTED, images=False), "v5e-8")
    assert text.tower_bytes == 0 and plan.weight_bytes - plan.tower_bytes == text.weight_bytes
    assert plan.num_pages < text.num_pages
    assert plan.decode_seconds(4096) == text.decode_seconds(4096)
    assert [case.name for case in plan.cases()] == ["decode", "prefill", "image"]
    assert [case.name for case in text.cases()] == ["decode", "prefill"]
    # What a step does not take of the tower, and the tower's own case of the text and the cache,
    # is on the device all the same.
    for name, taken in (
        ("decode", plan.resident_bytes - plan.tower_bytes),
        ("image", plan.tower_bytes),
    ):
        step = replace(COMPILED, case=name, argument_bytes=taken + 7)
        assert plan.device_bytes(step) == plan.resident_bytes + 7 + 100


@pytest.mark.slow  # a minute
def test_steps_with_images_compile():
    wanted = Wanted(model="gemma-3-4b", max_len=1024, batch=2, layers=1)
    plan = plan_target(wanted, "v5e-4", tensor_parallel=2)
    assert (plan.tensor_parallel, plan.data_parallel) == (2, 2)
    _, prefill, image = plan.compile()
    assert 0 <= plan.other_bytes(prefill) < 2**24
    assert 896 * 896 * 3 <= plan.other_bytes(image) < 2**24
    assert image.temp_bytes < 2**28  # the scores of all heads at once would be 2**30


def arguments(model, *more):
    return ["plan", "--model", model, "--max-len", "256", "--batch", "4", *more]


def test_the_printed_plan(capsys, monkeypatch):
    steps = COMPILED, replace(COMPILED, temp_bytes=50 * 2**20, seconds=3)
    monkeypatch.setattr(TargetPlan, "compile", lambda plan: steps)
    options = ["--target", "v5e-8", "--max-len", "32768", "--no-images"]
    assert main(arguments("gemma-3-27b", *options)) == 0
    out, err = capsys.readouterr()
    assert "gemma-3-27b on v5e-8: tensor parallel 8, data parallel 1; weights bfloat16" in out
    assert "52 windowed (1024) layers" in out and "10 global layers" in out
    assert "50.0" in out and "16,128.0" in out
    assert "nothing was run" in out and "a bound, no measurement" in " ".join(out.split())
    assert "GiB" not in err


def test_a_step_that_the_compiler_finds_too_large(monkeypatch):
    plan = plan_target(replace(WANTED, model="gemma-3-1b", max_len=1024), "v5e-1")

    def compiled(*steps):
        monkeypatch.setattr("jaxattn.engine.target_plan.compile_ahead", lambda *_, **__: steps)

    compiled(COMPILED, replace(COMPILED, case="prefill", temp_bytes=16 * 2**30))
    with pytest.raises(DoesNotFitError, match=r"the prefill step does not fit .* 16\.93 GiB"):
        plan.compile()
    compiled(COMPILED, replace(COMPILED, error="E1000: Ran out of memory on HBM"))
    with pytest.raises(DoesNotFitError, match="E1000: Ran out of memory on HBM; give fewer"):
        plan.compile()
    compiled(COMPILED, replace(COMPILED, error="no such instruction"))
    with pytest.raises(CompilerError, match="step did not compile: no such instruction"):
        plan.compile()
    compiled(COMPILED, COMPILED)
    assert plan.device_bytes(plan.compile()[0]) == 10**9 + 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "v5e-1"], "use --target v5e-4, v5e-8"),
        (["--target", "v9-1"], "target 'v9-1': v5e-1, v5e-4"),
        (["--target", "v5e-8", "--memory", "1GiB"], "with --target the memory is the chip's"),
        (["--target", "v5e-8", "--max-len", "200000"], "the model's positions end at 131072"),
    ],
)
def test_refusals_are_one_line(capsys, more, message):
    assert main(arguments("gemma-3-27b", *more)) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("jaxattn: error: ") and message in err


def test_options_of_a_target_without_one(capsys):
    assert main(arguments("gemma-3-27b", "--data-parallel", "2", "--dtype", "float32")) == 1
    assert "--dtype, --data-parallel: only with --target" in capsys.readouterr().err


def test_without_libtpu(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name)
    )
    assert main(arguments("gemma-3-1b", "--target", "v5e-1")) == 1
    assert "pip install 'jaxattn[tpu-plan]'" in capsys.readouterr().err
    with pytest.raises(LibtpuMissingError):
        plan_target(replace(WANTED, model="gemma-3-1b"), "v5e-1").compile()


# A model that the kernels take, and that compiles in seconds.
TINY = Gemma3Config(
    embed_dim=64,
    mlp_dim=128,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    query_scale=64**-0.5,
    max_position=256,
    layers=layer_pattern(2, sliding_window=8, global_every=2),
    vocab_size=304,
)
TINY_JSON = CONFIG_JSON | {
    "vocab_size": 304,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window_pattern": 2,
}


def test_a_tiny_model_compiles(tmp_path, capsys):
    """Four chips share two kv heads. The compiler's count of the arguments is ours."""
    tensors = hf_tensors(random_weights(TINY))
    folder = write_folder(tmp_path / "tiny", tensors, config_json=TINY_JSON)
    wanted = Wanted(model=str(folder), max_len=256, batch=4, prefill_tokens=32, layers=2)
    assert wanted.config() == TINY
    plan = plan_target(wanted, "v5e-4", tensor_parallel=4)
    (step,) = compile_ahead(plan.slice.topology, plan.cases()[:1])
    assert not step.error
    cache = sum(map(plan.pool_bytes, range(2)))
    assert plan.weight_bytes + cache <= step.argument_bytes < plan.weight_bytes + cache + 2**20
    assert step.alias_bytes >= cache  # in place
    assert plan.device_bytes(step) < plan.slice.hbm_bytes
