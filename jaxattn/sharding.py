"""Attention over a mesh: every device attends with its own heads, and holds their pages."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import KVPages, QuantizedPages

DATA, HEADS = "data", "heads"  # the axes of an engine's mesh: requests, and what heads cut


def pages_sharding(kv_pages: KVPages, axis: str) -> PartitionSpec | QuantizedPages:
    """How a layer's pages, or their shapes, are cut over a mesh axis: whole rows, of whole heads.

    Each device's rows lie as of its own heads alone, see `StoreSpec.pages`.
    """
    rows = PartitionSpec(None, None, axis)
    if not isinstance(kv_pages, QuantizedPages):
        return rows
    return QuantizedPages(rows, PartitionSpec(None, axis))  # type: ignore[arg-type]


def over_heads(attention: Callable, axis: str, shards: int) -> Callable:
    """`jaxattn.ragged_paged_attention` for a mesh in use whose axis `axis` cuts the heads.

    The pages are those of `shards` devices, as many as the axis has.

    Queries, keys, values, sinks and pages are cut by heads, everything else is on every device.
    """

    def call(
        queries: Float[Array, "tokens q_heads head_dim"],
        keys: Float[Array, "tokens kv_heads head_dim"],
        values: Float[Array, "tokens kv_heads head_dim"],
        kv_pages: KVPages,
        *lengths: Int32[Array, "..."],
        sinks: Float[Array, "q_heads"] | None,
        image_spans: Int32[Array, "tokens 2"] | None,
        first_page: Int32[Array, "seqs"] | None,
        **static: Any,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        if axis not in sizes:
            raise ValueError(f"heads_axis={axis!r} is no axis of the mesh in use: {sizes}")
        if sizes[axis] != shards:
            raise ValueError(f"pages of {shards} devices on {sizes[axis]} of axis {axis!r}")
        if keys.shape[1] % shards:
            raise ValueError(f"{keys.shape[1]} kv heads cannot be cut over {shards} devices")
        heads, whole = PartitionSpec(None, axis), PartitionSpec()
        pages = pages_sharding(kv_pages, axis)
        optional = {"sinks": sinks, "image_spans": image_spans, "first_page": first_page}
        given = {name: array for name, array in optional.items() if array is not None}
        specs = {"sinks": PartitionSpec(axis), "image_spans": whole, "first_page": whole}

        def on_device(arrays: tuple, given: dict) -> tuple:
            return attention(*arrays, **dict.fromkeys(optional) | given, **static)

        arrays = queries, keys, values, kv_pages, *lengths
        return jax.shard_map(
            on_device,
            in_specs=(
                (heads, heads, heads, pages, *[whole] * len(lengths)),
                {name: specs[name] for name in given},
            ),
            out_specs=(heads, pages),
        )(arrays, given)

    return call
