"""The attention layers that the TPU benchmarks look at, and one call of each to compile."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import Target, kv_pages_shape, ragged_paged_attention
from jaxattn.spec import ImageRule

POOL_TOKENS = 64 * 4096  # 4.3 GB for 27B; schedules do not depend on it
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Layer:
    """One attention layer's geometry, on one chip. `sliding_window` is that of its local layers."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(DTYPE).itemsize

    def flops(self, queries: int, keys: int) -> int:
        """Of scores and weighted values for so many queries that all see so many keys."""
        return 4 * queries * keys * self.num_q_heads * self.head_dim


LAYERS = (
    Layer("27B", 32, 16, 128, 1024),
    Layer("27B on 4 chips", 8, 4, 128, 1024),
    Layer("27B on 8 chips", 4, 2, 128, 1024),
    Layer("4B", 8, 4, 256, 1024),
    Layer("1B", 4, 1, 256, 512),
    Layer("gpt-oss-like", 64, 8, 64, 128),
)


def ragged_call(
    target: Target,
    devices: tuple[Any, ...],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    page_size: int,
    table_tokens: int,
    seqs: int,
    tokens: int,
    soft_cap: float | None = None,
    sinks: bool = False,
    image_rule: ImageRule = "none",
    causal: bool = True,
    query_dtype: str = DTYPE,
    kv_dtype: str = DTYPE,
    first_page: bool = False,
    update_kv_cache: bool = True,
) -> tuple[jax.stages.Wrapped, tuple]:
    """A jitted mixed batch for one layer, its pages donated, and the shapes of its arguments.

    Options as in `jaxattn.registry.Need`; an `image_rule` comes with image spans.
    """

    def call(*arguments: Any) -> Any:
        return ragged_paged_attention(
            *arguments[: len(arrays)],
            **dict(zip(optional, arguments[len(arrays) :], strict=True)),
            sm_scale=head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            image_rule=image_rule,
            causal=causal,
            update_kv_cache=update_kv_cache,
            backend="pallas_tpu",
            target=target,
        )

    pages = kv_pages_shape(
        num_pages=POOL_TOKENS // page_size + 1,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype,
    )

    def new(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.dtype(query_dtype))

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays = (
        *(new(num_q_heads), new(num_kv_heads), new(num_kv_heads), pages),
        *(integers(seqs), integers(seqs, table_tokens // page_size)),
        *(integers(seqs + 1), integers(3)),
    )
    optional = {}
    if sinks:
        optional["sinks"] = jax.ShapeDtypeStruct((num_q_heads,), jnp.float32)
    if image_rule != "none":
        optional["image_spans"] = integers(tokens, 2)
    if first_page:
        optional["first_page"] = integers(seqs)

    return jax.jit(call, donate_argnums=3), (*arrays, *optional.values())
