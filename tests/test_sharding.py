"""Heads and pages cut over a mesh: equal to one device; cuts that do not fit are refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxattn import LayerSpec, MaskSpec, PageTable, RaggedBatch, StoreSpec, attend, group_layers
from jaxattn.cache.state import CacheState
from jaxattn.kernels.layout import KVLayout, QuantizedPages, page_array
from jaxattn.sharding import pages_sharding
from tests.attention_cases import SCALE, bits, make_case, run

LENGTHS = ((1, 37), (1, 9), (9, 30))
WINDOW = 11


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("heads", "kv_dtype"), [(2, "float32"), (4, "bfloat16"), (8, "int8")], ids=str
)
def test_two_devices_equal_one(heads, kv_dtype, sinks):
    dtype = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    case = make_case(
        LENGTHS, decode=2, page_size=8, kv_heads=heads, query_dtype=dtype, kv_dtype=kv_dtype
    )
    store = StoreSpec(page_size=8, num_kv_heads=heads, head_dim=8, dtype=kv_dtype)
    mask = MaskSpec(sliding_window=WINDOW, sinks=sinks)
    layer = LayerSpec(name="a", num_q_heads=2 * heads, scale=SCALE, mask=mask, store=store)
    plan = group_layers((layer,), max_len=64)
    logits = jnp.linspace(-1, 2, 2 * heads) if sinks else None
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    spec = pages_sharding(store.layout, "heads", 2)
    shardings = jax.tree.map(lambda each: NamedSharding(mesh, each), spec)
    pages = jax.tree.map(jax.device_put, case.pages(), shardings)
    table = PageTable(jnp.asarray(case.table), jnp.zeros(3, jnp.int32))
    places = map(jnp.asarray, (case.kv_lens, case.cu_q_lens, case.distribution))
    batch = RaggedBatch(*places, (table,))
    arrays = map(jnp.asarray, (case.queries, case.keys, case.values))

    @jax.jit
    def step(queries, keys, values, cache, batch):
        options = {"plan": plan, "batch": batch, "sinks": logits, "heads_axis": "heads"}
        return attend(layer, queries, keys, values, cache, backend="xla", **options)

    with jax.set_mesh(mesh):
        out, cache = step(*arrays, CacheState({"a": pages}), batch)
    expect, expect_pages = run(case, "xla", sliding_window=WINDOW, sinks=logits)
    np.testing.assert_allclose(np.asarray(out, np.float32), expect.astype(np.float32), atol=2e-2)
    assert np.array_equal(bits(page_array(cache.pages["a"])), bits(page_array(expect_pages)))
    assert page_array(cache.pages["a"]).sharding.spec[2] == "heads"  # stays cut


def test_pages_are_cut_by_rows_of_heads():
    layout = KVLayout(num_kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")
    assert pages_sharding(layout, "x", 4) == PartitionSpec(None, None, "x")
    quantized = pages_sharding(replace(layout, dtype="int8"), "x", 2)
    assert quantized == QuantizedPages(PartitionSpec(None, None, "x"), PartitionSpec(None, "x"))


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "size", "says"),
    [
        (6, 128, "bfloat16", 4, "6 kv heads cannot be cut over 4 devices of axis 'x'"),
        (4, 128, "bfloat16", 4, "1 a device do not fill the words that 2 heads share in bfloat16"),
        (8, 128, "int8", 4, "2 a device do not fill the words that 4 heads share in int8"),
        (6, 64, "int8", 2, "3 a device do not fill the words that 4 heads share in int8"),
        (2, 64, "bfloat16", 2, "1 a device do not fill the words that 2 heads share in bfloat16"),
    ],
)
def test_cuts_through_words_are_refused(heads, head_dim, dtype, size, says):
    layout = KVLayout(num_kv_heads=heads, head_dim=head_dim, page_size=32, dtype=dtype)
    with pytest.raises(ValueError, match=says):
        pages_sharding(layout, "x", size)


def test_an_axis_that_is_not_there():
    case = make_case(LENGTHS, decode=2, page_size=8, kv_heads=2)
    store = StoreSpec(page_size=8, num_kv_heads=2, head_dim=8, dtype="float32")
    layer = LayerSpec(name="a", num_q_heads=4, scale=SCALE, mask=MaskSpec(), store=store)
    table = PageTable(jnp.asarray(case.table), jnp.zeros(3, jnp.int32))
    places = map(jnp.asarray, (case.kv_lens, case.cu_q_lens, case.distribution))
    with pytest.raises(ValueError, match=r"heads_axis='heads' is no axis of the mesh in use: \{\}"):
        attend(
            layer,
            *map(jnp.asarray, (case.queries, case.keys, case.values)),
            CacheState({"a": case.pages()}),
            plan=group_layers((layer,), max_len=64),
            batch=RaggedBatch(*places, (table,)),
            heads_axis="heads",
        )
