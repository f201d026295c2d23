"""What a decode kernel is specialised on, and the sizes that follow."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.products import compute_dtype
from jaxattn.kernels.pallas.tiles import DecodeTiles, round_up


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """What a decode kernel is specialised on."""

    layout: KVLayout
    num_q_heads: int
    query_dtype: str
    sm_scale: float
    soft_cap: float | None
    sinks: bool
    most_tokens: int | None  # most visible keys of a query (its window), None: no bound
    from_zero: bool  # every query sees its sequence from position 0 on
    update_kv_cache: bool
    tiles: DecodeTiles
    interpret: bool

    def __post_init__(self) -> None:
        page_size = self.layout.page_size
        if not self.single and self.tiles.tile_tokens % page_size:
            raise ValueError(
                f"{self.tiles}: expected tile_tokens to be a multiple of {page_size=}, where a "
                "tile does not hold a whole window"
            )

    @property
    def single(self) -> bool:
        """Whether all that a query can see fits one tile."""
        return self.most_tokens is not None and self.most_tokens <= self.tiles.tile_tokens

    @property
    def full_tokens(self) -> int:
        """Visible tokens of a full tile."""
        return self.most_tokens if self.single else self.tiles.tile_tokens  # type: ignore[return-value]

    @property
    def paged_tokens(self) -> int:
        """Those of them that come from pages: a single tile holds the query's own key too."""
        return self.full_tokens - (self.single and self.update_kv_cache)

    @property
    def small_tokens(self) -> int:
        """A quarter of a tile's columns, or what rounds up to it: for short sequences."""
        columns, layout = self.tiles.columns(self.layout), self.layout
        step = layout.page_size if layout.is_quantized else LANES // layout.pack
        return min(round_up(columns // 4, step), columns)

    @property
    def groups(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.layout.num_kv_heads

    @property
    def words(self) -> int:
        """Groups of heads that share words."""
        return self.layout.padded_heads // self.layout.shared[0]

    @property
    def words_per_product(self) -> int:
        """Groups of heads in one product: enough rows for the 8 sublanes of a register."""
        rows = self.layout.shared[0] * self.groups
        counts = [count for count in range(1, self.words + 1) if self.words % count == 0]
        return next((count for count in counts if count * rows >= 8), self.words)

    @property
    def product_rows(self) -> int:
        """Query heads in one product."""
        return self.words_per_product * self.layout.shared[0] * self.groups

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the operands of both products."""
        return compute_dtype(self.layout, self.query_dtype)
