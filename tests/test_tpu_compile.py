"""What the registry claims for TPU compiles, for every chip: by libtpu's compiler, without a TPU.

Each claimed value of each axis is compiled once, the rest being as in `BASE`, and so are the
shapes of Gemma 3. The registry decides what is refused; all that it does not refuse must compile.
"""

from dataclasses import fields

import pytest

from benchmarks.tpu_aot import Case, compile_cases
from benchmarks.tpu_shapes import LAYERS
from jaxattn import Target
from jaxattn.kernels.pallas.tiles import CHIPS
from jaxattn.registry import CAPABILITIES, Need, supports

ROW = CAPABILITIES["pallas_tpu"]
BASE = {
    "num_q_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "sliding_window": 256,
    "page_size": 32,
    "table_tokens": 2048,
    "seqs": 8,
    "tokens": 256,
    "soft_cap": None,
    "sinks": False,
    "image_rule": "none",
    "causal": True,
    "query_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "first_page": False,
    "update_kv_cache": True,
}
# Values of these fields are not in the row; a test of the same names keeps the list complete.
NOT_VARIED = {"target", "num_q_heads", "num_kv_heads", "table_entries", "interpret", "tiles"}


def claims():
    """(fields, options) of every claimed value, and of pairs that meet in the layout."""
    for head_dim in ROW.head_dims:
        for sliding_window in (256, None):
            yield "head_dim", {"head_dim": head_dim, "sliding_window": sliding_window}
    for query_dtype in ROW.query_dtypes:
        for kv_dtype in ROW.kv_dtypes:
            dtypes = {"query_dtype": query_dtype, "kv_dtype": kv_dtype}
            yield "query_dtype kv_dtype", dtypes
            if query_dtype == "bfloat16":  # a word is shared otherwise
                yield "kv_dtype head_dim", dtypes | {"head_dim": min(ROW.head_dims)}
                yield "kv_dtype head_dim", dtypes | {"head_dim": max(ROW.head_dims)}
    least, most = ROW.page_sizes
    for page_size in sorted({least, 16, 64, 128, most}):
        yield "page_size", {"page_size": page_size}
    for sliding_window in (1, 100, 128, 1024, 4096, None):  # one tile, several, no window
        yield "sliding_window", {"sliding_window": sliding_window}
    least, most = ROW.q_heads_per_kv_head
    for num_kv_heads in (1, 2, 3, 8):
        for ratio in sorted({least, 2, 5, most}):
            heads = {"num_q_heads": num_kv_heads * ratio, "num_kv_heads": num_kv_heads}
            yield "heads", heads
    features = {}
    for name, claimed, value in (
        ("soft_cap", ROW.soft_cap, 30.0),
        ("sinks", ROW.sinks, True),
        ("causal", ROW.non_causal, False),
        ("first_page", ROW.first_page, True),
        ("update_kv_cache", ROW.shared_kv, False),
    ):
        if claimed:
            features[name] = value
            yield name, {name: value}
    for image_rule in ROW.image_rules:
        for sliding_window in (256, None):
            yield "image_rule", {"image_rule": image_rule, "sliding_window": sliding_window}
    yield "everything", features | {"image_rule": ROW.image_rules[-1]}
    for layer in LAYERS:
        geometry = {
            "num_q_heads": layer.num_q_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
        }
        for sliding_window in (layer.sliding_window, None):
            yield layer.name, geometry | {"sliding_window": sliding_window, "seqs": 64}


def need(target, options):
    """The registry's view of a case."""
    facts = BASE | options
    entries = facts["seqs"] * (facts["table_tokens"] // facts["page_size"])
    given = {name: facts[name] for name in facts.keys() & {each.name for each in fields(Need)}}
    return Need(
        target=Target.tpu(target), table_entries=entries, interpret=False, tiles=None, **given
    )


def cases(target):
    """(cases to compile, refusals by name) of all claims."""
    wanted, refused = {}, {}
    for field, options in claims():
        name = f"{field}: " + ", ".join(f"{key}={value}" for key, value in options.items())
        reasons = supports(ROW, need(target, options))
        if reasons:
            refused[name] = reasons
        else:
            wanted[name] = Case(name, "benchmarks.tpu_shapes:ragged_call", BASE | options)
    return list(wanted.values()), refused


def test_every_field_of_a_need_is_varied():
    varied = {word for field, _ in claims() for word in field.split()}
    assert {each.name for each in fields(Need)} - varied == NOT_VARIED


@pytest.mark.parametrize("target", CHIPS)
def test_only_what_the_chip_lacks_is_refused(target):
    """Refusals are float8 where there is none, and nothing else: the claims are not hollow."""
    wanted, refused = cases(target)
    assert len(wanted) > 60
    float8 = {name for name in refused if "float8" in name and not CHIPS[target].float8}
    assert set(refused) == float8


def check_compiles(target, wanted):
    results = compile_cases(target, wanted)
    assert [each.case for each in results] == [each.name for each in wanted]
    failures = [f"{each.case}: {each.error_type}: {each.error}" for each in results if each.error]
    assert not failures, "\n".join(failures)
    # The pages are donated, and no second pool lies around them.
    for each in results:
        assert each.alias_bytes > 0 and each.temp_bytes < each.alias_bytes, each.case


@pytest.mark.parametrize("target", CHIPS)
def test_everything_at_once_and_one_model_compile(target):
    wanted, _ = cases(target)
    few = [each for each in wanted if each.name.startswith(("everything", "27B on 8 chips"))]
    assert len(few) == 3  # a local and a global layer
    check_compiles(target, few)


@pytest.mark.slow  # a tiny one is in test_target_plan.py
@pytest.mark.parametrize("target", CHIPS)
def test_the_engines_step_on_four_chips_compiles(target):
    """Weights and pages cut by heads, sampling on the device; two layers of 27B."""
    shape = {"model": "gemma-3-27b", "chips": 4, "max_len": 8192, "seqs": 16, "layers": 2}
    step = "benchmarks.tpu_models:whole_step"
    check_compiles(target, [Case("decode", step, shape | {"tokens": 16})])


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS)
def test_what_is_not_refused_compiles(target):
    wanted, _ = cases(target)
    check_compiles(target, wanted)


# (query heads, kv heads, head dim, query dtype, cache dtype, window): around what VMEM holds.
LARGE = (
    (16, 16, 256, "float32", "float32", 2048),
    (64, 64, 128, "bfloat16", "bfloat16", 1024),
    (64, 4, 256, "float32", "float32", 512),
    (32, 32, 256, "bfloat16", "int8", 1024),
    (128, 16, 128, "bfloat16", "bfloat16", None),
    (40, 40, 128, "float32", "float32", 2500),
    (96, 8, 256, "float32", "bfloat16", None),
    (256, 16, 256, "bfloat16", "bfloat16", None),
)
LARGE_NAMES = (
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "query_dtype",
    "kv_dtype",
    "sliding_window",
)


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS)
def test_the_vmem_estimate_lets_through_only_what_compiles(target):
    wanted = []
    for sizes in LARGE:
        options = dict(zip(LARGE_NAMES, sizes, strict=True))
        reasons = supports(ROW, need(target, options))
        if reasons:
            assert "MiB of VMEM" in reasons[0].asked
        else:
            case = Case(str(sizes), "benchmarks.tpu_shapes:ragged_call", BASE | options)
            wanted.append(case)
    assert len(wanted) >= 6
    check_compiles(target, wanted)
