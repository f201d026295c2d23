"""What is not claimed is refused while tracing, with the value, the claim and a way out."""

import logging
import os
import re
import sys
import types
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from jaxattn import (
    Target,
    UnsupportedAttentionError,
    kv_pages_shape,
    ragged_paged_attention,
    registry,
    support_table,
)
from jaxattn.kernels.pallas.gpu_shape import GpuTiles
from jaxattn.kernels.pallas.tiles import CHIPS, SMEM_ENTRIES, DecodeTiles, Tiles
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillTiles
from jaxattn.registry import ANY, AUTOMATIC, CAPABILITIES, Need, select, supports
from tests.attention_cases import (
    UNOPTIMIZED,
    cells,
    dtypes_of,
    interpreted,
    runs_here,
    usable_rows,
)

CPU = Target("cpu", "cpu")
T4 = Target("gpu", "Tesla T4", (7, 5))
H100 = Target("gpu", "NVIDIA H100", (9, 0))
V6E = Target.tpu("v6e")
XLA, PALLAS_TPU = CAPABILITIES["xla"], CAPABILITIES["pallas_tpu"]
NEED = Need(
    target=CPU,
    sliding_window=11,
    soft_cap=None,
    sinks=False,
    image_rule="none",
    causal=True,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=16,
    query_dtype="float32",
    kv_dtype="float32",
    first_page=False,
    update_kv_cache=True,
    table_entries=12,
    interpret=False,
    tiles=None,
)
ON_TPU = replace(NEED, target=V6E, head_dim=128)
ON_GPU = replace(NEED, target=H100, head_dim=128, query_dtype="bfloat16", kv_dtype="bfloat16")
SMALL_TILES = Tiles(decode=DecodeTiles(tile_tokens=64, slots=3, block_seqs=2))
HUGE_TILES = Tiles(prefill=PrefillTiles(blocks=64, block_kv=4096))


def inside(row):
    """A need that is inside the row's claims."""
    need = {"pallas_tpu": ON_TPU, "pallas_gpu": ON_GPU}.get(row.backend, NEED)
    assert supports(row, need) == ()
    return need


def as_float(array):
    return np.asarray(array, np.float32)


def shape(dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def arguments(need=NEED):
    """The public function's arguments that ask for exactly this need (shapes, no values)."""
    new = shape((6, need.num_kv_heads, need.head_dim), need.query_dtype)
    pages = kv_pages_shape(
        num_pages=5,
        page_size=need.page_size,
        num_kv_heads=need.num_kv_heads,
        head_dim=need.head_dim,
        dtype=need.kv_dtype,
    )
    arrays = {
        "queries": shape((6, need.num_q_heads, need.head_dim), need.query_dtype),
        "keys": new,
        "values": new,
        "kv_pages": pages,
        "kv_lens": shape((3,), "int32"),
        "page_indices": shape((3, need.table_entries // 3), "int32"),
        "cu_q_lens": shape((4,), "int32"),
        "distribution": shape((3,), "int32"),
    }
    if need.sinks:
        arrays["sinks"] = shape((need.num_q_heads,))
    if need.image_rule != "none":
        arrays["image_spans"] = shape((6, 2), "int32")
    if need.first_page:
        arrays["first_page"] = shape((3,), "int32")
    static = {
        "sm_scale": 1.0,
        "sliding_window": need.sliding_window,
        "soft_cap": need.soft_cap,
        "image_rule": need.image_rule,
        "causal": need.causal,
        "update_kv_cache": need.update_kv_cache,
        "target": need.target,
        "interpret": need.interpret,
        "tiles": need.tiles,
    }
    return arrays, static


def trace(need=NEED, *, changes=None, **options):
    """Trace the public function; nothing is computed. `changes` replace single arguments."""
    arrays, static = arguments(need)
    for name, value in (changes or {}).items():
        (static if name in static else arrays)[name] = value
    return jax.eval_shape(partial(ragged_paged_attention, **static, **options), **arrays)


# Values outside a row's claim, one entry for each field of Need: [(changes, what it says)].


def outside_target(row):
    if row.platforms is not ANY:
        yield {"target": Target("abacus")}, "on abacus (abacus)"
    if row.chips is not ANY:
        yield {"target": Target("tpu", "TPU v3")}, "on tpu (TPU v3)"
    if row.compute_capabilities is not ANY:
        for major, minor in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0)):
            target = Target("gpu", "another", (major, minor))
            yield {"target": target}, f"on another (compute capability {major}.{minor})"
        yield {"target": Target("gpu", "AMD Instinct MI300X")}, "on gpu (AMD Instinct MI300X)"


def outside_set(field, name, values):
    def outside(row):
        allowed = getattr(row, name)
        if allowed is not ANY:
            for value in values:
                if value not in allowed:
                    yield {field: value}, str(value)

    return outside


def outside_page_size(row):
    if row.page_sizes is not ANY:
        least, most = row.page_sizes
        for page_size in {max(least - 1, 1), most + 1} - set(range(least, most + 1)):
            yield {"page_size": page_size}, f"page_size={page_size}"
        if row.page_sizes_of_two:
            for page_size in (24, 40, 48, 96):
                yield {"page_size": page_size}, f"page_size={page_size}"
    step = row.quantized_page_multiple
    if step > 1:
        for dtype in ("int8", "float8_e4m3fn"):
            for page_size in (step // 2, step + step // 2):
                says = f"page_size={page_size} with a cache of {dtype}"
                yield {"page_size": page_size, "kv_dtype": dtype}, says


def outside_kv_dtype(row):
    yield from outside_set("kv_dtype", "kv_dtypes", ("float16", "float32"))(row)
    for chip in CHIPS.values() if row.chips is not ANY else ():
        if not chip.float8:
            for dtype in ("float8_e4m3fn", "float8_e5m2"):
                changes = {"kv_dtype": dtype, "target": Target.tpu(chip.name), "page_size": 32}
                yield changes, f"cache dtype={dtype} on {chip.name}"


def outside_table_entries(row):
    if row.max_table_entries is not ANY:
        entries = row.max_table_entries + 3 - row.max_table_entries % 3  # of three sequences
        yield {"table_entries": entries}, f"a page table of {entries} entries"


def outside_tiles(row):
    """Sizes given to a backend without them, or that do not fit the fast memory of a chip."""
    if not row.needs_vmem:
        yield {"tiles": SMALL_TILES}, "tiles=Tiles("
    if not row.needs_smem:
        yield {"tiles": GpuTiles()}, "tiles=GpuTiles("
    if row.needs_smem:
        changes = {"tiles": GpuTiles(tile_tokens=128, stages=2), "head_dim": 256}
        yield changes, "354 KiB of shared memory for head_dim=256 and a cache of bfloat16"
    if not row.needs_vmem:
        return
    yield {"tiles": HUGE_TILES}, "MiB of VMEM for 2 query heads and 1 kv heads of 128"
    many = {"num_q_heads": 128, "num_kv_heads": 128, "head_dim": 256}
    yield many | {"target": Target.tpu("tpu7x")}, "MiB of VMEM for 128 query heads and 128 kv"


def outside_ratio(row):
    if row.q_heads_per_kv_head is not ANY:
        least, most = row.q_heads_per_kv_head
        for ratio in {max(least - 1, 1), most + 1} - set(range(least, most + 1)):
            heads = {"num_q_heads": 2 * ratio, "num_kv_heads": 2}
            yield heads, f"query heads per kv head={ratio}"


def outside_flag(changes, flag, says):
    return lambda row: [] if getattr(row, flag) else [(changes, says)]


def outside_soft_cap(row):
    if not row.soft_cap:
        yield {"soft_cap": 30.0}, "soft_cap=30.0"
    elif row.max_soft_cap is not ANY:
        yield {"soft_cap": 1.5 * row.max_soft_cap}, f"soft_cap={1.5 * row.max_soft_cap}"


OUTSIDE = {
    "target": outside_target,
    "sliding_window": outside_flag({"sliding_window": 7}, "sliding_window", "sliding_window=7"),
    "soft_cap": outside_soft_cap,
    "sinks": outside_flag({"sinks": True}, "sinks", "attention sinks"),
    "image_rule": outside_set("image_rule", "image_rules", ("clamp", "extend")),
    "causal": outside_flag({"causal": False}, "non_causal", "causal=False"),
    "num_q_heads": outside_ratio,
    "num_kv_heads": lambda row: [],  # judged with num_q_heads, as a ratio
    "head_dim": outside_set("head_dim", "head_dims", (40, 72, 512)),
    "page_size": outside_page_size,
    "query_dtype": outside_set(
        "query_dtype", "query_dtypes", ("float16", "float32", "float8_e5m2")
    ),
    "kv_dtype": outside_kv_dtype,
    "first_page": outside_flag({"first_page": True}, "first_page", "first_page"),
    "update_kv_cache": outside_flag(
        {"update_kv_cache": False}, "shared_kv", "update_kv_cache=False"
    ),
    "table_entries": outside_table_entries,
    "interpret": lambda row: [],  # a ValueError: see test_only_a_pallas_backend_is_interpreted
    "tiles": outside_tiles,
}
CELLS = [
    pytest.param(row, changes, says, id=f"{row.backend}-{field}-{says}")
    for row in CAPABILITIES.values()
    for field, outside in OUTSIDE.items()
    for changes, says in outside(row)
]


def test_every_field_of_a_need_is_probed():
    assert set(OUTSIDE) == {field.name for field in fields(Need)}


@pytest.mark.parametrize(("row", "changes", "says"), CELLS)
def test_every_unclaimed_cell_is_refused(row, changes, says):
    """Through the public call, and the error carries exactly the need that was asked."""
    need = replace(inside(row), **changes)
    with pytest.raises(UnsupportedAttentionError) as raised:
        trace(need, backend=row.backend)
    assert raised.value.need == need
    reasons = raised.value.reasons[row.backend]
    assert len(reasons) == 1  # this cell, and nothing else, is why
    assert says in reasons[0].asked
    assert reasons[0].supported and reasons[0].do
    assert str(reasons[0]) in str(raised.value)


FLAGS = [
    ("sliding_window", {"sliding_window": 7}, "sliding_window=7"),
    ("soft_cap", {"soft_cap": 30.0}, "soft_cap=30.0"),
    ("max_soft_cap", {"soft_cap": 30.0}, "soft_cap=30.0"),
    ("sinks", {"sinks": True}, "attention sinks"),
    ("non_causal", {"causal": False}, "causal=False"),
    ("first_page", {"first_page": True}, "first_page"),
    ("shared_kv", {"update_kv_cache": False}, "update_kv_cache=False"),
    ("image_rules", {"image_rule": "clamp"}, "image_rule=clamp"),
    ("image_rules", {"image_rule": "extend"}, "image_rule=extend"),
    ("head_dims", {"head_dim": 64}, "head_dim=64"),
    ("page_sizes", {"page_size": 64}, "page_size=64"),
    ("page_sizes", {"page_size": 8}, "page_size=8"),
    ("q_heads_per_kv_head", {"num_q_heads": 5}, "query heads per kv head=5"),
    ("q_heads_per_kv_head", {"num_q_heads": 1}, "query heads per kv head=1"),
    ("query_dtypes", {"query_dtype": "bfloat16"}, "query dtype=bfloat16"),
    ("kv_dtypes", {"kv_dtype": "int8"}, "cache dtype=int8"),
    ("platforms", {"target": Target("tpu", "TPU v6e")}, "on tpu (TPU v6e)"),
    ("compute_capabilities", {"target": T4}, "on Tesla T4 (compute capability 7.5)"),
    ("chips", {"target": V6E}, "on tpu (TPU v6 lite)"),
    ("max_table_entries", {"table_entries": 15}, "a page table of 15 entries"),
    ("quantized_page_multiple", {"kv_dtype": "int8"}, "page_size=16 with a cache of int8"),
    ("needs_vmem", {"tiles": SMALL_TILES}, "tiles=Tiles("),
    ("needs_smem", {"tiles": GpuTiles()}, "tiles=GpuTiles("),
    ("page_sizes_of_two", {"page_size": 24}, "page_size=24"),
    ("interpreter", {"interpret": True}, "interpret=..."),
]
NARROW = {
    "sliding_window": False,
    "soft_cap": False,
    "max_soft_cap": 10.0,
    "sinks": False,
    "non_causal": False,
    "first_page": False,
    "shared_kv": False,
    "image_rules": ("none",),
    "head_dims": (8,),
    "page_sizes": (16, 32),
    "q_heads_per_kv_head": (2, 4),
    "query_dtypes": ("float32",),
    "kv_dtypes": ("float32",),
    "platforms": ("cpu",),
    "compute_capabilities": ((8, 0),),
    "chips": ("v5e",),
    "max_table_entries": 14,
    "quantized_page_multiple": 32,
    "needs_vmem": False,
    "needs_smem": False,
    "page_sizes_of_two": True,
    "interpreter": False,
}
# What no row claims at once.
EVERYTHING = replace(XLA, needs_vmem=True, needs_smem=True, interpreter=True)


@pytest.mark.parametrize(("claim", "changes", "says"), FLAGS)
def test_every_rule_refuses_when_its_claim_is_taken_away(claim, changes, says):
    need = replace(NEED, sliding_window=None) if claim != "sliding_window" else NEED
    need = replace(need, **changes)
    assert supports(EVERYTHING, need) == ()
    (reason,) = supports(replace(EVERYTHING, **{claim: NARROW[claim]}), need)
    assert says in reason.asked
    assert reason.supported and reason.do


def test_all_claims_are_taken_away_above():
    assert {claim for claim, *_ in FLAGS} == set(NARROW)
    described = {"backend", "what"}
    assert set(NARROW) == {field.name for field in fields(XLA)} - described


def test_all_reasons_are_listed_at_once():
    row = replace(XLA, **{**NARROW, "platforms": ("tpu",)})
    need = replace(
        NEED,
        soft_cap=2.0,
        sinks=True,
        image_rule="clamp",
        causal=False,
        num_q_heads=7,
        head_dim=64,
        page_size=8,
        query_dtype="float16",
        kv_dtype="int8",
        first_page=True,
        update_kv_cache=False,
        table_entries=15,
        interpret=True,
        tiles=SMALL_TILES,
    )
    assert len(supports(row, need)) == len(fields(Need)) - 1  # num_kv_heads is in the ratio


def test_a_field_without_a_rule_is_an_error():
    """The registry as it would be with one more field in Need."""
    source = Path(registry.__file__).read_text()
    field = "    update_kv_cache: bool\n"
    assert source.count(field) == 1
    name = f"{registry.__name__}_wider"
    sys.modules[name] = types.ModuleType(name)  # where dataclasses look a class's module up
    try:
        exec(source, sys.modules[name].__dict__)
        with pytest.raises(TypeError, match="every field of Need has exactly one rule"):
            exec(source.replace(field, field + "    alibi: bool\n"), sys.modules[name].__dict__)
    finally:
        del sys.modules[name]


def test_the_message_of_one_backend():
    with pytest.raises(UnsupportedAttentionError) as raised:
        trace(replace(NEED, head_dim=40, page_size=513), backend="xla")
    dims = ", ".join(map(str, XLA.head_dims))
    assert str(raised.value).splitlines() == [
        "'xla' cannot serve this attention on cpu (cpu):",
        f"  xla: head_dim=40: supported: {dims}; pad the head dimension to one of these",
        "  xla: page_size=513: supported: 1 to 512; plan the cache with another page_size",
        "  backends that can: 'reference'",
    ]
    assert isinstance(raised.value, NotImplementedError)


def test_the_message_of_no_backend_lists_all_candidates():
    with pytest.raises(UnsupportedAttentionError) as raised:
        trace(replace(NEED, head_dim=40, query_dtype="float16"))
    assert tuple(raised.value.reasons) == AUTOMATIC
    message = str(raised.value)
    for backend, reasons in raised.value.reasons.items():
        assert reasons
        for reason in reasons:
            assert f"  {backend}: {reason}" in message
    assert len(raised.value.reasons["xla"]) == 2
    assert raised.value.alternatives == ()
    assert "backends that can" not in message


def test_float16_queries_are_refused_with_a_way_out():
    with pytest.raises(UnsupportedAttentionError, match="float16") as raised:
        trace(replace(NEED, query_dtype="float16"))
    message = str(raised.value)
    assert "use bfloat16 (the same bytes) or float32" in message and "65504" in message


def test_a_t4_is_refused_by_the_gpu_kernel_and_served_by_xla():
    with pytest.raises(UnsupportedAttentionError) as raised:
        trace(replace(NEED, target=T4), backend="pallas_gpu")
    message = str(raised.value)
    assert "Tesla T4 (compute capability 7.5)" in message
    assert "supported: compute capability 9.0 (h100, h200); use backend='xla'" in message
    assert "use backend='xla'" in message
    assert raised.value.alternatives == ("xla", "reference")
    assert select(replace(NEED, target=T4)) == "xla"


@pytest.mark.parametrize("backend", [None, "xla", "reference"])
def test_only_a_pallas_backend_is_interpreted(backend):
    """And only one that is named: an interpreter is never a silent choice."""
    message = f"interpret= with backend={backend!r}: name one of pallas_tpu, pallas_gpu"
    with pytest.raises(ValueError, match=message):
        trace(backend=backend, changes={"interpret": True})
    assert trace(ON_TPU, backend="pallas_tpu", changes={"interpret": True, "target": None})


def test_a_tpu_is_served_by_its_kernels():
    assert select(ON_TPU) == "pallas_tpu"
    assert select(replace(ON_TPU, head_dim=8)) == "xla"
    with pytest.raises(ValueError, match="chip='v4': the chips are 'v5e', 'v5p', 'v6e', 'tpu7x'"):
        Target.tpu("v4")


def test_the_target_may_come_from_an_abstract_mesh():
    for chip in CHIPS.values():
        device = AbstractDevice(device_kind=chip.device_kinds[0], num_cores=1, platform="tpu")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert Target.current() == Target.tpu(chip.name)
    assert Target.current().platform == "cpu"


def test_a_hopper_gpu_is_served_by_its_kernels():
    assert select(ON_GPU) == select(replace(ON_GPU, target=Target.gpu("h200"))) == "pallas_gpu"
    assert select(replace(ON_GPU, query_dtype="float32")) == "xla"
    with pytest.raises(ValueError, match="gpu 'v100': the names are 'h100', 'h200', 'b200'"):
        Target.gpu("v100")
    assert Target.gpu("H100") == Target.gpu("h100")
    for page_size in (8, 24, 256):
        with pytest.raises(UnsupportedAttentionError, match="supported: 16, 32, 64, 128; plan"):
            select(replace(ON_GPU, page_size=page_size), "pallas_gpu")
    with pytest.raises(UnsupportedAttentionError, match="with interpret=True, name an absent chip"):
        select(replace(ON_GPU, target=Target("cpu")), "pallas_gpu")


@pytest.mark.parametrize("name", ["b200", "a100", "l4", "t4"])
def test_other_gpus_are_refused_and_served_by_xla(name):
    need = replace(ON_GPU, target=Target.gpu(name))
    with pytest.raises(UnsupportedAttentionError, match="use backend='xla'"):
        trace(need, backend="pallas_gpu")
    assert select(need) == "xla"


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("AMD Instinct MI300X", None),
    ],
)
def test_an_abstract_gpu_is_known_by_its_name(kind, capability):
    """It has no compute capability, and would be compiled as Hopper whatever it is."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert Target.current() == Target("gpu", kind, capability)


@pytest.mark.parametrize(
    ("given", "parsed"), [("9.0", (9, 0)), ("10.0", (10, 0)), ("gfx942", None)]
)
def test_a_compute_capability_is_nvidias(given, parsed):
    assert registry._parsed(given) == parsed


def test_gpu_tiles_of_a_wrong_size():
    with pytest.raises(ValueError, match="tile_tokens=96: a tile holds 64 or 128 keys"):
        GpuTiles(tile_tokens=96)
    for wrong in (0, 1, True, 2.0):  # with one stage two warpgroups would wait for each other
        with pytest.raises(ValueError, match=f"stages={wrong}: expected an integer from 2 on"):
            GpuTiles(stages=wrong)


def test_a_table_must_fit_smem():
    """The limit itself is served, and the way out is a larger page or a smaller step."""
    assert supports(PALLAS_TPU, replace(ON_TPU, table_entries=SMEM_ENTRIES)) == ()
    (reason,) = supports(PALLAS_TPU, replace(ON_TPU, table_entries=SMEM_ENTRIES + 1))
    assert "page_size above 16" in reason.do


# Refused while tracing, wherever that is: nothing of the program has run.


@pytest.fixture
def ran():
    return []


def refused(ran):
    """A function of a float that marks its run, then asks for a head_dim nobody claims."""

    def step(x):
        jax.debug.callback(lambda: ran.append(True))
        arrays, static = arguments(replace(NEED, head_dim=40))
        arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), arrays)
        out, _ = ragged_paged_attention(**arrays, **static, backend="xla")
        return x + out.sum()

    return step


def test_refused_inside_jit(ran):
    with pytest.raises(UnsupportedAttentionError, match="head_dim=40"):
        jax.jit(refused(ran))(jnp.float32(1))
    with pytest.raises(UnsupportedAttentionError, match="head_dim=40"):
        jax.make_jaxpr(refused(ran))(jnp.float32(1))
    jax.effects_barrier()
    assert not ran


def test_refused_inside_scan(ran):
    step = refused(ran)
    with pytest.raises(UnsupportedAttentionError, match="head_dim=40"):
        jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=3))(jnp.float32(1))
    jax.effects_barrier()
    assert not ran


def test_refused_inside_shard_map(ran):
    assert len(jax.devices()) >= 2
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    shards = PartitionSpec("shard")
    step = jax.shard_map(refused(ran), mesh=mesh, in_specs=shards, out_specs=shards)
    with pytest.raises(UnsupportedAttentionError, match="head_dim=40"):
        jax.jit(step)(jnp.zeros(2))
    jax.effects_barrier()
    assert not ran


@pytest.mark.parametrize("row", usable_rows())
def test_served_inside_shard_map_and_scan(row):
    """The same call, claimed, over kv heads on two devices and over layers in a scan."""
    sizes = {"num_kv_heads": 4, "num_q_heads": 8, "head_dim": min(row.head_dims or (8,))}
    need = replace(NEED, **sizes, **dtypes_of(row))
    arrays, static = arguments(need)
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        for name, leaf in arrays.items()
    } | {
        "kv_lens": jnp.array([30, 9, 0], jnp.int32),
        "page_indices": jnp.array([[1, 2, 0, 0], [3, 0, 0, 0], [0] * 4], jnp.int32),
        "cu_q_lens": jnp.array([0, 1, 5, 5], jnp.int32),
        "distribution": jnp.array([1, 2, 2], jnp.int32),
    }
    if not runs_here(row):
        static |= {"target": None} | interpreted(row.backend, need.page_size)
    jit = partial(jax.jit, compiler_options=None if runs_here(row) else UNOPTIMIZED)
    attention = partial(ragged_paged_attention, **static, backend=row.backend)
    expect, pages = jit(attention)(**arrays)
    heads, whole = PartitionSpec(None, "heads"), PartitionSpec()
    by_head = {"queries": heads, "keys": heads, "values": heads}
    in_pages = PartitionSpec(None, None, "heads")  # rows
    specs = {name: by_head.get(name, whole) for name in arrays} | {"kv_pages": in_pages}

    def sharded(**static):
        return jit(
            jax.shard_map(
                lambda arrays: attention(**arrays, **static),
                mesh=jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,)),
                in_specs=(specs,),
                out_specs=(heads, in_pages),
            )
        )

    if row.backend == "pallas_gpu" and not runs_here(row):
        # Its interpreter takes the end of one device's kernel for that of all: only lowered.
        traced = sharded(interpret=False, tiles=None, target=H100).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert all(name in text for name in ("jaxattn_decode", "jaxattn_prefill"))
    else:
        out, out_pages = sharded()(arrays)
        np.testing.assert_allclose(as_float(out), as_float(expect), atol=1e-6)
        np.testing.assert_array_equal(out_pages, pages)

    def layer(kv_pages, _):
        out, kv_pages = attention(**arrays | {"kv_pages": kv_pages})
        return kv_pages, out

    out_pages, outs = jit(lambda first: jax.lax.scan(layer, first, length=2))(arrays["kv_pages"])
    np.testing.assert_allclose(as_float(outs), as_float(jnp.stack([expect] * 2)), atol=1e-6)
    np.testing.assert_array_equal(out_pages, pages)


# Names.


def test_unknown_backend():
    names = ", ".join(map(repr, CAPABILITIES))
    with pytest.raises(ValueError, match=f"backend='cudnn': the backends are {names}"):
        trace(backend="cudnn")


def test_unknown_keyword():
    with pytest.raises(TypeError, match="unexpected keyword argument 'alibi_slopes'"):
        trace(alibi_slopes=None)


def test_no_backend_never_picks_the_reference():
    assert "reference" not in AUTOMATIC
    with pytest.raises(UnsupportedAttentionError, match="backends that can: 'reference'"):
        trace(replace(NEED, head_dim=40))
    assert select(replace(NEED, head_dim=40), "reference") == "reference"


def test_the_choice_is_logged_once_for_each_target(caplog):
    registry._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="jaxattn"):
        for _ in range(3):
            trace()
            trace(replace(NEED, head_dim=16))
        trace(backend="reference")  # asked for by name: nothing was chosen
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend 'xla' chosen on cpu (cpu)"
    ]


def test_the_default_target_is_this_process():
    assert Target.current().platform == jax.devices()[0].platform
    with jax.default_device(jax.devices()[1]):
        assert Target.current().platform == "cpu"


# Wrong in itself, whatever the backend.


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (-1, ValueError, "sliding_window=-1: expected at least 1"),
        (0, ValueError, "sliding_window=0: expected at least 1"),
        (2**31, ValueError, "sliding_window=2147483648: expected at most 2147483647"),
        (True, TypeError, "sliding_window=True: expected a Python int, got bool"),
        ((3, 0), TypeError, "sliding_window=(3, 0): expected a Python int, got tuple"),
        (3.0, TypeError, "sliding_window=3.0: expected a Python int, got float"),
        (np.int32(3), TypeError, "expected a Python int, got int32"),
    ],
    ids=str,
)
def test_windows_that_are_no_windows(window, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        trace(changes={"sliding_window": window})
    assert "None for no window" in str(raised.value)


def test_a_traced_window_or_cap_is_refused():
    arrays, static = arguments()
    for name in ("sliding_window", "soft_cap", "sm_scale"):
        rest = {key: value for key, value in static.items() if key != name}
        with pytest.raises(TypeError, match=f"{name}=.*expected a Python"):
            jax.eval_shape(
                lambda arrays, traced, rest=rest, name=name: ragged_paged_attention(
                    **arrays, **rest, **{name: traced}
                ),
                arrays,
                shape((), "int32"),
            )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0: expected a positive, finite number"),
        ({"soft_cap": float("inf")}, ValueError, "soft_cap=inf"),
        ({"soft_cap": True}, TypeError, "soft_cap=True: expected a Python float"),
        ({"sm_scale": True}, TypeError, "sm_scale=True: expected a Python float"),
        ({"causal": 1}, TypeError, "causal=1: expected True or False"),
        ({"update_kv_cache": None}, TypeError, "update_kv_cache=None: expected True or False"),
        ({"image_rule": "both"}, ValueError, "image_rule='both': use one of ('none', 'clamp'"),
        (
            {"image_spans": shape((6, 2), "int32")},  # NEED's rule is "none"
            ValueError,
            "image_spans were given to a layer with image_rule='none'",
        ),
    ],
    ids=str,
)
def test_wrong_static_arguments(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        trace(changes=changes)


FLOAT, INT = "float32", "int32"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"queries": shape((6, 16))}, ValueError, "queries (6, 16) and keys (6, 1, 8): expected"),
        ({"keys": shape((6, 8))}, ValueError, "expected [tokens, heads, head_dim]"),
        ({"keys": shape((6, 0, 8))}, ValueError, "2 query heads are not a multiple of 0 kv"),
        ({"queries": shape((0, 2, 8))}, ValueError, "queries hold no tokens"),
        ({"keys": shape((5, 1, 8))}, ValueError, "keys has shape (5, 1, 8), expected (6, 1, 8)"),
        ({"keys": shape((6, 1, 4))}, ValueError, "keys has shape (6, 1, 4), expected (6, 1, 8)"),
        ({"values": shape((6, 2, 8))}, ValueError, "values has shape (6, 2, 8), expected"),
        ({"kv_pages": shape((5, 16, 2, 8))}, ValueError, "make them by jaxattn.kv_pages_shape"),
        ({"kv_pages": shape((5, 16, 2, 1, 128))}, ValueError, "expected (5, 16, 1, 1, 128)"),
        ({"kv_pages": shape((5, 16, 2, 2, 8))}, ValueError, "kv_pages has shape (5, 16, 2, 2, 8)"),
        ({"kv_pages": shape((5, 16, 2, 1, 16))}, ValueError, "kv_pages has shape"),
        ({"kv_pages": shape((5, 16, 2, 1, 8), "int8")}, ValueError, "of int8 need scales"),
        ({"kv_lens": shape((3, 1), INT)}, ValueError, "kv_lens has shape (3, 1)"),
        ({"kv_lens": shape((3,), FLOAT)}, TypeError, "kv_lens has dtype float32, expected int32"),
        ({"page_indices": shape((12,), INT)}, ValueError, "page_indices (12,): expected"),
        ({"page_indices": shape((2, 4), INT)}, ValueError, "page_indices has shape (2, 4)"),
        ({"page_indices": shape((3, 4), FLOAT)}, TypeError, "page_indices has dtype float32"),
        ({"cu_q_lens": shape((3,), INT)}, ValueError, "cu_q_lens has shape (3,), expected (4,)"),
        ({"cu_q_lens": shape((4,), "uint32")}, TypeError, "cu_q_lens has dtype uint32"),
        ({"distribution": shape((2,), INT)}, ValueError, "distribution has shape (2,), expected"),
        ({"distribution": shape((3,), FLOAT)}, TypeError, "distribution has dtype float32"),
        ({"first_page": shape((2,), INT)}, ValueError, "first_page has shape (2,), expected (3,)"),
        ({"first_page": shape((3,), FLOAT)}, TypeError, "first_page has dtype float32"),
        ({"image_spans": shape((6,), INT)}, ValueError, "image_spans has shape (6,), expected"),
        ({"image_spans": shape((6, 2), FLOAT)}, TypeError, "image_spans has dtype float32"),
        ({"sinks": shape((1,))}, ValueError, "sinks has shape (1,), expected (2,)"),
        ({"sinks": shape((2,), INT)}, TypeError, "sinks have dtype int32, expected a float"),
        ({"keys": shape((6, 1, 8), "bfloat16")}, TypeError, "keys bfloat16 and values float32"),
        ({"values": shape((6, 1, 8), "bfloat16")}, TypeError, "values bfloat16 differ; cast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        trace(changes=changes)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv heads"):
        trace(replace(NEED, num_q_heads=3, num_kv_heads=2))


def test_scales_that_do_not_fit():
    arrays, _ = arguments(replace(NEED, kv_dtype="int8"))
    pages = arrays["kv_pages"]
    wrong_shape = pages._replace(scales=shape((5, 2, 16)))
    with pytest.raises(ValueError, match=r"kv_pages.scales has shape \(5, 2, 16\), expected"):
        trace(changes={"kv_pages": wrong_shape})
    with pytest.raises(TypeError, match=r"kv_pages.scales has dtype bfloat16, expected float32"):
        trace(changes={"kv_pages": pages._replace(scales=shape((5, 2, 64), "bfloat16"))})


def test_every_array_argument_is_probed():
    cases = test_arrays_that_do_not_fit.pytestmark[0].args[1]
    probed = {name for changes, *_ in cases for name in changes}
    everything = replace(NEED, sinks=True, image_rule="clamp", first_page=True)
    assert probed == set(arguments(everything)[0])


# The table.


def test_the_table_says_what_the_rows_say():
    lines = support_table().splitlines()
    assert lines[0] == "| | " + " | ".join(f"`{name}`" for name in CAPABILITIES) + " |"
    table = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
    for row in CAPABILITIES.values():
        assert row.what in table["what"]
    assert "8, 16, 32, 64, 80, 96, 128, 192, 256" in table["head dims"]
    assert "1 to 512" in table["page sizes"]
    assert len({line.count(" | ") for line in lines[2:]}) == 1


def test_the_readme_holds_the_table():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    begin, end = "<!-- support table: begin -->", "<!-- support table: end -->"
    assert begin in readme and end in readme
    copy = readme.split(begin)[1].split(end)[0]
    assert copy.strip() == support_table().strip()


@pytest.mark.parametrize("name", ["queries", "keys", "kv_pages", "kv_lens", "page_indices"])
@pytest.mark.parametrize("wrong", [None, [1, 2]])
def test_an_argument_that_is_no_array_is_named(name, wrong):
    arrays, static = arguments()
    with pytest.raises(TypeError, match=f"{name} is a {type(wrong).__name__}, expected an array"):
        ragged_paged_attention(**(arrays | {name: wrong}), **static)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lens": (0,), "page_indices": (0, 4), "cu_q_lens": (1,)},
        {"page_indices": (3, 0)},
        {"kv_pages": (0, 16, 2, 1, 8)},
    ],
)
def test_nothing_to_attend_to_is_refused(changes):
    dtypes = {"kv_pages": "float32"}
    empty = {name: shape(dims, dtypes.get(name, "int32")) for name, dims in changes.items()}
    with pytest.raises(ValueError, match="no sequences, pages or table columns"):
        trace(changes=empty)


@pytest.mark.parametrize("row", cells(lambda row: [("", row.interpreter)]))
def test_numpy_arrays_are_taken(row):
    need = replace(NEED, first_page=True, head_dim=min(row.head_dims or (8,)), **dtypes_of(row))
    arrays, static = arguments(need)
    if not runs_here(row):
        static |= {"target": None} | interpreted(row.backend, need.page_size)
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    out, pages = ragged_paged_attention(**zeros, **static, backend=row.backend)
    assert isinstance(out, jax.Array) and isinstance(pages, jax.Array)
    assert (out == 0).all() and out.shape == zeros["queries"].shape


@pytest.mark.parametrize("interpret", [1, "yes", np.True_, 0.5], ids=repr)
def test_interpret_of_a_wrong_kind(interpret):
    for need, backend, params in (
        (ON_TPU, "pallas_tpu", "InterpretParams"),
        (ON_GPU, "pallas_gpu", "InterpretGPUParams"),
    ):
        with pytest.raises(TypeError, match=f"expected True, False or {params}"):
            trace(need, changes={"interpret": interpret}, backend=backend)


def test_an_interpreted_block_needs_a_thread_for_each_warpgroup(monkeypatch):
    """With fewer it would wait for ever."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(jax, "devices", lambda *_: [None])
    with pytest.raises(RuntimeError, match="needs 3 threads, here are 2; set XLA_FLAGS="):
        trace(ON_GPU, changes={"interpret": True}, backend="pallas_gpu")


def test_tiles_and_targets_of_a_wrong_kind():
    with pytest.raises(TypeError, match=r"decode=PrefillTiles\(.*expected DecodeTiles or None"):
        Tiles(decode=PrefillTiles())
    with pytest.raises(TypeError, match=r"tiles=.small.: expected jaxattn\.Tiles"):
        trace(ON_TPU, changes={"tiles": "small"}, backend="pallas_tpu")
    with pytest.raises(TypeError, match=r"target=.v6e.: expected a jaxattn\.Target"):
        trace(changes={"target": "v6e"})


def test_a_backend_that_is_passed_over_is_named_with_its_reasons(caplog):
    need = replace(ON_TPU, page_size=4)
    registry._log_choice.cache_clear()
    assert select(need) == "xla"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'xla' chosen on tpu (TPU v6 lite): pallas_tpu: page_size=4" in record.message
