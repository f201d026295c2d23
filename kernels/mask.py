"""The one place that says which key a query sees. Every backend and every drawing calls it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def visible(
    q_positions: Int32[Array, "queries"],
    k_positions: Int32[Array, "keys"],
    *,
    sliding_window: int | None = None,
    causal: bool = True,
    image_spans: Int32[Array, "queries 2"] | None = None,
    image_rule: str = "clamp",
) -> Bool[Array, "queries keys"]:
    """`True` where the query at an absolute position sees the key at an absolute position.

    Causal with window W: `q - W < k <= q`. Not causal with window W: `|q - k| < W`.
    `image_spans[i] = (start, end)` are the absolute positions of the image that query i belongs
    to (`start == end`: none). Inside its own image a query also sees later keys; `image_rule`
    "clamp" still hides keys at `q - W` and before, "extend" shows the whole image:

        clamp, W = 3, image = 2..4         extend, W = 3, image = 2..4
        key   0 1 2 3 4 5                  key   0 1 2 3 4 5
        q=2   x x x x x .                  q=2   x x x x x .
        q=3   . x x x x .                  q=3   . x x x x .
        q=4   . . x x x .                  q=4   . . x x x .
        q=5   . . . x x x                  q=5   . . . x x x
    """
    return sees(
        q_positions[:, None],
        k_positions[None, :],
        None if image_spans is None else (image_spans[:, 0, None], image_spans[:, 1, None]),
        sliding_window=sliding_window,
        causal=causal,
        image_rule=image_rule,
    )


def sees(
    query: Int32[Array, "..."],
    key: Int32[Array, "..."],
    span: tuple[Int32[Array, "..."], Int32[Array, "..."]] | None,
    *,
    sliding_window: int | None,
    causal: bool,
    image_rule: str,
) -> Bool[Array, "..."]:
    """`visible` for positions that broadcast together; `span`: start and end of query's image."""
    shape = jnp.broadcast_shapes(query.shape, key.shape)
    seen = key <= query if causal else jnp.full(shape, True)
    in_window = None
    if sliding_window is not None:
        in_window = query - sliding_window < key
        if not causal:
            in_window &= key < query + sliding_window
    if span is not None:
        same_image = (span[0] <= key) & (key < span[1])
        if image_rule == "extend" and in_window is not None:
            return (seen & in_window) | same_image
        seen |= same_image
    return seen if in_window is None else seen & in_window


def visible_range(
    query: Int32[Array, "..."],
    span: tuple[Int32[Array, "..."], Int32[Array, "..."]] | None,
    *,
    sliding_window: int | None,
    causal: bool,
    image_rule: str,
    kv_len: Int32[Array, "..."],
) -> tuple[Int32[Array, "..."], Int32[Array, "..."]]:
    """`sees` as a range: the query sees exactly the keys `first <= k < end` of its sequence.

    What a query sees has no holes, as long as its image, if it has one, contains it.
    """
    first, end = jnp.zeros_like(query), query + 1 if causal else kv_len
    if sliding_window is not None:
        first = query - (sliding_window - 1)
        if not causal:
            end = query + sliding_window
    if span is not None:
        inside = (span[0] <= query) & (query < span[1])
        extends = image_rule == "extend" or sliding_window is None
        if image_rule == "extend":
            first = jnp.where(inside, jnp.minimum(first, span[0]), first)
        if extends or causal:
            end = jnp.where(inside, jnp.maximum(end, span[1]), end)
    return jnp.maximum(first, 0), jnp.minimum(end, kv_len)
