"""Layers of one plan: the mask is the layer's, only the pages are the group's."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import (
    CacheState,
    LayerSpec,
    MaskSpec,
    PageTable,
    RaggedBatch,
    StoreSpec,
    attend,
    group_layers,
)
from jaxattn.registry import CAPABILITIES
from tests.attention_cases import (
    SCALE,
    UNOPTIMIZED,
    bits,
    cells,
    dtypes_of,
    expected,
    interpreted,
    live_only,
    make_case,
    page_size_of,
    tolerance_of,
    usable_rows,
)

WINDOW = 11
XLA = CAPABILITIES["xla"]
LENGTHS = ((1, 37), (9, 9), (6, 50), (12, 12))
HEAD_DIM = 64  # which every backend claims


def layer(name, window, share=None, row=XLA, **mask):
    return LayerSpec(
        name=name,
        num_q_heads=2,
        scale=SCALE,
        mask=MaskSpec(sliding_window=window, **mask),
        store=StoreSpec(
            page_size=page_size_of(row, 8),
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            dtype=row.kv_dtypes[0],
        ),
        share_kv_from=share,
    )


def layers_of(row):
    """A windowed layer, a global one, and one of another window."""
    return tuple(
        layer(name, window, row=row)
        for name, window in (("local", WINDOW), ("global", None), ("other", 5))
    )


@cache
def case_of(name, row=XLA):
    """A case of this layer's own keys and values, on the same pages as every other layer's."""
    shape = dict(page_size=page_size_of(row, 8), head_dim=HEAD_DIM, **dtypes_of(row))
    shape |= dict(decode=1, tokens=32, seqs=6, width=8)
    case, other = make_case(LENGTHS, **shape), make_case(LENGTHS, **shape, seed=len(name))
    pool = np.zeros_like(case.pool)
    for sequence, (q_len, kv_len) in enumerate(LENGTHS):
        for position in range(kv_len - q_len):
            column, slot = divmod(position, case.page_size)
            for part in (0, 1):
                token = other.stored[sequence][part][position]
                pool[case.table[sequence, column], slot, part] = token
    return replace(other, pool=pool, table=case.table)


def table_of(case):
    zeros = np.zeros(len(case.table), np.int32)
    first_page = zeros if case.first_page is None else case.first_page
    return PageTable(jnp.asarray(case.table), jnp.asarray(first_page))


def step(plan, tables, row, layers, **options):
    """All layers' outputs and the cache, in one jitted step."""
    case = case_of("local", row)
    options |= interpreted(row.backend, case.page_size)
    batch = RaggedBatch(
        *map(jnp.asarray, (case.kv_lens, case.cu_q_lens, case.distribution)), tables
    )
    cache = CacheState(
        {name: case_of(name, row).pages() for group in plan.groups for name in group.layers}
    )

    @partial(jax.jit, compiler_options=UNOPTIMIZED if "interpret" in options else None)
    def forward(cache, batch):
        outputs = {}
        for each in layers:
            mine = case_of(plan.storage_of(each.name), row)
            q_k_v = map(jnp.asarray, (mine.queries, mine.keys, mine.values))
            outputs[each.name], cache = attend(
                each, *q_k_v, cache, plan=plan, batch=batch, backend=row.backend, **options
            )
        return outputs, cache

    return jax.tree.map(np.asarray, forward(cache, batch))


def check(out, name, window, row):
    atol = tolerance_of(row)
    wanted = expected(case_of(name, row), sliding_window=window)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=atol, rtol=atol)


@pytest.mark.parametrize(
    ("row", "layers"),
    cells(
        lambda row: [
            ("windowed first", layers_of(row), False),
            ("global first", layers_of(row)[::-1], row.interpreter),
        ]
    ),
)
def test_layers_of_one_group_keep_their_own_windows(row, layers):
    """Windowed and global layers share one table (hybrid off), whichever comes first."""
    plan = group_layers(layers, hybrid=False, max_len=64)
    assert len(plan.groups) == 1
    outputs, _ = step(plan, (table_of(case_of("local", row)),), row, layers)
    for each in layers:
        check(outputs[each.name], each.name, each.mask.sliding_window, row)


@pytest.mark.parametrize("row", cells(lambda row: [("", row.backend == "pallas_gpu")]))
def test_storage_does_not_change_outputs(row):
    """Hybrid on (live pages only, a table a group) and off (all pages, one table)."""
    full, layers = case_of("local", row), layers_of(row)
    off = group_layers(layers, hybrid=False, max_len=64)
    on = group_layers(layers, hybrid=True, max_len=64)
    assert [group.store.retention for group in on.groups] == [WINDOW, None, 5]
    tables = tuple(
        table_of(live_only(full, group.store.retention))
        if group.store.retention
        else table_of(full)
        for group in on.groups
    )
    assert tables[0].page_indices.shape[1] < full.table.shape[1]
    outputs_on, _ = step(on, tables, row, layers)
    for each in layers:
        check(outputs_on[each.name], each.name, each.mask.sliding_window, row)
    if row.backend == "xla":  # walks blocks of absolute positions, whatever the table holds
        outputs_off, _ = step(off, (table_of(full),), row, layers)
        for each in layers:
            assert np.array_equal(bits(outputs_on[each.name]), bits(outputs_off[each.name]))


@pytest.mark.parametrize("row", usable_rows())
def test_a_sharing_layer_reads_its_donor_under_its_own_mask(row):
    layers = layers_of(row)[1], layer("shares", WINDOW, share="global", row=row)
    plan = group_layers(layers, max_len=64)
    tables = (table_of(case_of("global", row)),)
    outputs, cache = step(plan, tables, row, layers)
    check(outputs["global"], "global", None, row)
    check(outputs["shares"], "global", WINDOW, row)
    _, alone = step(group_layers(layers[:1], max_len=64), tables, row, layers[:1])
    assert set(cache.pages) == {"global"}
    assert np.array_equal(bits(cache.pages["global"]), bits(alone.pages["global"]))


def test_a_layer_gets_what_its_mask_says():
    local, case = layers_of(XLA)[0], case_of("local")
    plan = group_layers(layers_of(XLA), max_len=64)
    table = table_of(case)
    batch = RaggedBatch(
        *map(jnp.asarray, (case.kv_lens, case.cu_q_lens, case.distribution)), (table,) * 3
    )
    cache = CacheState({"local": case.pages()})
    q_k_v = [jnp.asarray(each) for each in (case.queries, case.keys, case.values)]
    with pytest.raises(ValueError, match="'local' has sinks=False, but sinks were given"):
        attend(local, *q_k_v, cache, plan=plan, batch=batch, sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match="'local' has sinks=True, but none were given"):
        attend(layer("local", 5, sinks=True), *q_k_v, cache, plan=plan, batch=batch)
    with pytest.raises(ValueError, match="'local' has 2 query heads, got 1"):
        attend(local, q_k_v[0][:, :1], *q_k_v[1:], cache, plan=plan, batch=batch)


@pytest.mark.parametrize("rule", ["none", "clamp", "extend"])
def test_every_mask_attribute_reaches_the_kernel(rule):
    """Soft cap, sinks and image rule of the layer; a layer without a rule ignores the spans."""
    spans = np.zeros((32, 2), np.int32)
    spans[10:16] = 44, 50  # the new tokens of the third sequence
    spans[16:28] = 0, 12
    sinks = jnp.array([1.0, -0.5])
    each = layer("local", 5, soft_cap=0.7, sinks=True, image_rule=rule)
    plan = group_layers([each], max_len=64)
    tables, options = (table_of(case_of("local")),), {"image_spans": jnp.asarray(spans)}
    outputs, _ = step(plan, tables, XLA, [each], sinks=sinks, **options)
    case = case_of("local")
    case = case if rule == "none" else replace(case, image_spans=spans)
    expect = expected(case, sliding_window=5, soft_cap=0.7, sinks=sinks, image_rule=rule)
    np.testing.assert_allclose(outputs["local"], expect, atol=2e-5, rtol=2e-5)
