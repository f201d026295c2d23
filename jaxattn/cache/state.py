"""The cache on the device: a pytree of page pools. Donated in, returned out, never mutated."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.kernels import layout
from jaxattn.kernels.layout import KVPages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheState:
    """The pages of every layer that owns storage, by layer name. Page 0 of each stays zero."""

    pages: dict[str, KVPages]

    def updated(self, owner: str, kv_pages: KVPages) -> "CacheState":
        """The state with one layer's pages replaced."""
        return CacheState({**self.pages, owner: kv_pages})


def cache_shapes(plan: CachePlan, num_pages: Sequence[int]) -> CacheState:
    """Shapes and dtypes of the cache (`jax.ShapeDtypeStruct` leaves); nothing is allocated.

    `num_pages`: pages of each group's pool, the null page included. A pool belongs to one group
    only, so memory is the sum over groups of `num_pages * plan.page_bytes(group)`.
    """
    if len(num_pages) != len(plan.groups):
        raise ValueError(f"{num_pages=}: expected one number for each of {len(plan.groups)} groups")
    pages = {}
    for group, size in zip(plan.groups, num_pages, strict=True):
        if size < 2:
            raise ValueError(f"{num_pages=}: a pool needs the null page and at least one more")
        for name in group.layers:
            pages[name] = group.store.pages(size)
    return CacheState(pages)  # type: ignore[arg-type]


def init_cache(plan: CachePlan, num_pages: Sequence[int]) -> CacheState:
    """A cache of zeros, see `cache_shapes`."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache_shapes(plan, num_pages)
    )


def append(
    cache: CacheState,
    plan: CachePlan,
    layer_name: str,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    batch: RaggedBatch,
) -> CacheState:
    """Write a batch's new tokens into a layer's pages, without attending.

    Tokens whose table entry is no page are dropped. A layer that shares another's KV owns no
    pages: ValueError.
    """
    owner = plan.storage_of(layer_name)
    if owner != layer_name:
        raise ValueError(f"layer {layer_name!r} reads the pages of {owner!r} and writes none")
    _check_whole(plan, layer_name)
    table = batch.tables[plan.group_of(layer_name)]
    written = layout.write_tokens(
        cache.pages[owner],
        keys,
        values,
        batch.kv_lens,
        table.page_indices,
        batch.cu_q_lens,
        batch.distribution,
        table.first_page,
    )
    return cache.updated(owner, written)


def gather(
    cache: CacheState, plan: CachePlan, layer_name: str, batch: RaggedBatch, sequence: int
) -> tuple[
    Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"], Array
]:
    """Keys, values and absolute positions of every token in one sequence's table, for inspection.

    Positions run from `first_page * page_size`; rows at and beyond `kv_lens` are not yet written.
    """
    table = batch.tables[plan.group_of(layer_name)]
    pages = cache.pages[plan.storage_of(layer_name)]
    store = plan.groups[plan.group_of(layer_name)].store
    _check_whole(plan, layer_name)
    keys, values = layout.read_pages(
        pages,
        table.page_indices[sequence],
        num_kv_heads=store.num_kv_heads,
        head_dim=store.head_dim,
    )
    start = table.first_page[sequence] * store.page_size
    return keys, values, start + jnp.arange(len(keys), dtype=jnp.int32)


def _check_whole(plan: CachePlan, layer_name: str) -> None:
    shards = plan.groups[plan.group_of(layer_name)].store.shards
    if shards > 1:
        raise ValueError(
            f"the pages of layer {layer_name!r} are cut over {shards} devices, each with a layout "
            "of its own: only `attend` reads and writes them"
        )
