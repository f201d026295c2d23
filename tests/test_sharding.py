"""Heads and pages cut over a mesh: equal to one device; cuts that do not fit are refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxattn import LayerSpec, MaskSpec, PageTable, RaggedBatch, StoreSpec, attend, group_layers
from jaxattn.cache.state import CacheState, append, gather
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
    store = StoreSpec(page_size=8, num_kv_heads=heads, head_dim=8, dtype=kv_dtype, shards=2)
    mask = MaskSpec(sliding_window=WINDOW, sinks=sinks)
    layer = LayerSpec(name="a", num_q_heads=2 * heads, scale=SCALE, mask=mask, store=store)
    plan = group_layers((layer,), max_len=64)
    logits = jnp.linspace(-1, 2, 2 * heads) if sinks else None
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    spec = pages_sharding(store.pages(2), "heads")
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
    store = StoreSpec(num_kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16", shards=4)
    assert pages_sharding(store.pages(2), "x") == PartitionSpec(None, None, "x")
    quantized = pages_sharding(replace(store, dtype="int8").pages(2), "x")
    assert quantized == QuantizedPages(PartitionSpec(None, None, "x"), PartitionSpec(None, "x"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 256), (4, 64), (8, 128), (12, 64)])
def test_each_device_has_the_pages_of_its_own_heads(heads, head_dim, dtype):
    """Also where the heads of all would share words across devices."""
    geometry = {"head_dim": head_dim, "page_size": 32, "dtype": dtype}
    store = StoreSpec(num_kv_heads=heads, shards=4, **geometry)
    own = KVLayout(num_kv_heads=heads // 4, **geometry).pages(3)
    whole = store.pages(3)
    mesh = AbstractMesh((4,), ("x",))
    shards = jax.tree.map(
        lambda leaf, spec: NamedSharding(mesh, spec).shard_shape(leaf.shape),
        whole,
        pages_sharding(whole, "x"),
    )
    assert shards == jax.tree.map(lambda leaf: leaf.shape, own)
    layer = LayerSpec(name="a", num_q_heads=heads, scale=SCALE, mask=MaskSpec(), store=store)
    plan = group_layers((layer,), max_len=64)
    own_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own))
    assert 3 * plan.page_bytes(0) == 4 * own_bytes


def test_heads_that_devices_cannot_share():
    with pytest.raises(ValueError, match="6 kv heads cannot be cut over 4 devices"):
        StoreSpec(page_size=8, num_kv_heads=6, head_dim=8, dtype="float32", shards=4)


def test_pages_of_several_devices_are_read_by_attend_alone():
    plan, layer, arrays, batch, cache = sharded_case(shards=2)
    with pytest.raises(ValueError, match="'a' are of 2 devices: name a heads_axis"):
        attend(layer, *arrays, cache, plan=plan, batch=batch)
    for use in (lambda: gather(cache, plan, "a", batch, 0), lambda: append_to(plan, batch, cache)):
        with pytest.raises(ValueError, match="'a' are cut over 2 devices, each with a layout of"):
            use()
    mesh = AbstractMesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ValueError, match="pages of 2 devices on 4 of axis 'heads'"),
    ):
        attend(layer, *arrays, cache, plan=plan, batch=batch, heads_axis="heads")


def append_to(plan, batch, cache):
    new = jnp.zeros((11, 2, 8), jnp.float32)
    return append(cache, plan, "a", new, new, batch)


def sharded_case(shards):
    case = make_case(LENGTHS, decode=2, page_size=8, kv_heads=2)
    store = StoreSpec(page_size=8, num_kv_heads=2, head_dim=8, dtype="float32", shards=shards)
    layer = LayerSpec(name="a", num_q_heads=4, scale=SCALE, mask=MaskSpec(), store=store)
    table = PageTable(jnp.asarray(case.table), jnp.zeros(3, jnp.int32))
    places = map(jnp.asarray, (case.kv_lens, case.cu_q_lens, case.distribution))
    arrays = tuple(map(jnp.asarray, (case.queries, case.keys, case.values)))
    plan = group_layers((layer,), max_len=64)
    return plan, layer, arrays, RaggedBatch(*places, (table,)), CacheState({"a": case.pages()})


def test_an_axis_that_is_not_there():
    plan, layer, arrays, batch, cache = sharded_case(shards=2)
    with pytest.raises(ValueError, match=r"heads_axis='heads' is no axis of the mesh in use: \{\}"):
        attend(layer, *arrays, cache, plan=plan, batch=batch, heads_axis="heads")
