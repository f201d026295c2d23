"""What a prefill kernel is specialised on, and the sizes that follow."""

from dataclasses import dataclass
from math import gcd

import jax.numpy as jnp

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.products import LOG2_E, compute_dtype
from jaxattn.kernels.pallas.tiles import PrefillTiles

ONES = 16  # rows of ones below the values: whole registers in bfloat16 too


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """What a prefill kernel is specialised on."""

    layout: KVLayout
    num_q_heads: int
    query_dtype: str
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    image_rule: str
    causal: bool
    update_kv_cache: bool
    table_width: int
    tiles: PrefillTiles
    interpret: bool

    def __post_init__(self) -> None:
        sizes = self.tiles.block_q, self.tiles.block_kv
        if not self.interpret and any(size % LANES for size in sizes):
            raise ValueError(f"{self.tiles}: block_q and block_kv are multiples of {LANES}")
        if self.tiles.block_kv % (LANES if self.tiles.block_kv > LANES else 16):
            raise ValueError(
                f"{self.tiles}: block_kv is a multiple of 16, above {LANES} of {LANES}"
            )

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the operands of both products."""
        return compute_dtype(self.layout, self.query_dtype)

    @property
    def query_scale(self) -> float:
        """Folded into the queries: scores are exponents of 2, or arguments of the soft cap."""
        return self.sm_scale * LOG2_E if self.soft_cap is None else self.sm_scale / self.soft_cap

    @property
    def score_scale(self) -> float:
        """Multiplies what the soft cap gives."""
        return LOG2_E if self.soft_cap is None else self.soft_cap * LOG2_E

    @property
    def key_dim(self) -> int:
        """Elements of a key, padded to whole vectors."""
        return self.layout.lane_tiles * LANES

    @property
    def value_dim(self) -> int:
        """Elements of a value; a value that shares its vector with the key is half of one."""
        return LANES // 2 if self.layout.kinds == 1 else self.key_dim

    @property
    def groups(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.layout.num_kv_heads

    @property
    def stream_heads(self) -> int:
        """Query heads of a stream: 256 lanes are what a matrix unit takes at once."""
        fit = [heads for heads in range(1, self.groups + 1) if self.groups % heads == 0]
        return max(heads for heads in fit if heads == 1 or heads * self.tiles.block_q <= 2 * LANES)

    @property
    def lanes(self) -> int:
        """Lanes of a stream."""
        return self.stream_heads * self.tiles.block_q

    @property
    def streams_per_head(self) -> int:
        """Streams that share a kv head."""
        return self.groups // self.stream_heads

    @property
    def num_streams(self) -> int:
        """Streams of a block."""
        return self.num_q_heads // self.stream_heads

    @property
    def unit_streams(self) -> int:
        """Streams of a unit: 4 fill the pipeline on every chip (2: 12 % more bundles on v6e)."""
        return next(count for count in (4, 2, 1) if self.num_streams % count == 0)

    @property
    def units(self) -> int:
        """Units of a block."""
        return self.num_streams // self.unit_streams

    @property
    def piece(self) -> int:
        """Queries whose heads are put first at once: some registers' worth."""
        return gcd(32, self.tiles.block_q)

    @property
    def value_slots(self) -> int:
        """Tiles whose values are in use: outputs lag by two units, scores need no old keys."""
        return 3 if self.units == 1 else 2
