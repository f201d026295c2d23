"""Attention over a mesh: every device attends with its own heads, and holds their pages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import KVLayout, KVPages, QuantizedPages, layout_of


def pages_sharding(layout: KVLayout, axis: str, size: int) -> PartitionSpec | QuantizedPages:
    """How a layer's pages are cut over a mesh axis of `size` devices: whole rows, of whole heads.

    Raises ValueError if a device's heads would not lie as they do in the whole.
    """
    heads = layout.num_kv_heads
    if heads % size:
        raise ValueError(f"{heads} kv heads cannot be cut over {size} devices of axis {axis!r}")
    part = replace(layout, num_kv_heads=heads // size)
    through_words = size > 1 and part.num_kv_heads % layout.shared[0]
    if part.shared != layout.shared or through_words:
        raise ValueError(
            f"{heads} kv heads over {size} devices of axis {axis!r}: {heads // size} a device do "
            f"not fill the words that {layout.shared[0]} heads share in {layout.dtype}; use fewer "
            "devices, or repeat the kv heads"
        )
    rows = PartitionSpec(None, None, axis)
    if not layout.is_quantized:
        return rows
    return QuantizedPages(rows, PartitionSpec(None, axis))  # type: ignore[arg-type]


def over_heads(attention: Callable, axis: str) -> Callable:
    """`jaxattn.ragged_paged_attention` for a mesh in use whose axis `axis` cuts the heads.

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
        heads, whole = PartitionSpec(None, axis), PartitionSpec()
        pages = pages_sharding(layout_of(kv_pages, *keys.shape[1:]), axis, sizes[axis])
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
