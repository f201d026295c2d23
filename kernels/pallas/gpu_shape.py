"""Sizes of the GPU kernels: what a tile holds, and what it takes of shared memory.

A block of threads has one warpgroup that copies and one or two that compute. Each of these holds
64 rows, the height of Hopper's matrix instruction:

    decode      one warpgroup    rows are the query heads of one kv head, of one token
    prefill     two warpgroups   rows are 128 tokens of one query head
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxattn.kernels.layout import LANES, KVLayout

WARPGROUP_ROWS = 64
# Of an H100 and an H200: what a block may use. 1 KiB is the driver's own.
SMEM_BYTES = 227 * 1024
MULTIPROCESSORS = {"PCIe": 114, "H20": 78}  # in the device's name; all others have 132
ALIGNMENT = 1024
SMEM_SPARE = 2048  # of the driver, and of alignment


@dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes in place of the kernels' own. None: what `shape_for` finds best.

    `blocks` thread blocks share the work, `tile_tokens` keys (64 or 128) are one tile, of which
    `stages` are in flight. Raises ValueError for sizes that no kernel has.
    """

    blocks: int | None = None
    tile_tokens: int | None = None
    stages: int | None = None

    def __post_init__(self) -> None:
        if self.tile_tokens not in (None, 64, 128):
            raise ValueError(f"tile_tokens={self.tile_tokens}: a tile holds 64 or 128 keys")
        # With one stage two warpgroups that take turns would wait for each other.
        for name, least in (("blocks", 1), ("stages", 2)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}: expected an integer from {least} on")


def multiprocessors(device_kind: str) -> int:
    """Of a Hopper GPU: one thread block runs on each."""
    words = device_kind.replace("-", " ").split()
    return next((count for name, count in MULTIPROCESSORS.items() if name in words), 132)


@dataclass(frozen=True, kw_only=True)
class GpuShape:
    """Everything static about one launch."""

    layout: KVLayout
    num_q_heads: int
    decode: bool
    soft_cap: float | None
    sm_scale: float
    blocks: int
    tile_tokens: int
    stages: int

    @property
    def warpgroups(self) -> int:
        """That compute. Quantised tiles are converted by the one that uses them."""
        return 1 if self.decode or self.layout.is_quantized else 2

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that copies: at most 512 in all warpgroups."""
        if self.warpgroups == 1:
            return 256, 96  # with 80 and with 128 some shapes spill: see benchmarks/gpu_schedule.md
        return (240, 32) if self.lane_tiles == 2 else (216, 72)

    @property
    def lanes(self) -> int:
        """Elements of a key that one copy takes."""
        return LANES if self.layout.kinds == 2 else LANES // 2

    @property
    def lane_tiles(self) -> int:
        """Copies for a whole key."""
        return self.layout.lane_tiles

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_q_heads // self.layout.num_kv_heads

    @property
    def heads(self) -> int:
        """That visit a tile's keys one after the other: kv heads in decode, or query heads."""
        return self.layout.num_kv_heads if self.decode else self.num_q_heads

    @property
    def page_tokens(self) -> int:
        """Tokens of one copy: a page, or the part of a larger one that a tile holds."""
        return min(self.layout.page_size, self.tile_tokens)

    @property
    def pages(self) -> int:
        """Copies for a tile's keys, or its values, of `lanes` elements."""
        return self.tile_tokens // self.page_tokens

    def smem_bytes(self) -> int:
        """Shared memory of one thread block."""
        size, width = jnp.dtype(self.layout.dtype).itemsize, self.lane_tiles * self.lanes
        tile = self.tile_tokens * width
        buffers = [
            2 * self.rows * width,  # queries
            2 * self.rows * self.lanes,  # results
            *[self.stages * tile * size] * 2,  # keys and values
        ]
        if self.layout.is_quantized:
            buffers += [2 * tile] * 2  # as bfloat16
            buffers += [self.stages * self.tile_tokens * self.layout.pack * 4] * 2  # scales
        barriers = 8 * (3 * self.stages + 2)
        return sum(-(-each // ALIGNMENT) * ALIGNMENT for each in buffers) + barriers + SMEM_SPARE


def shape_for(
    layout: KVLayout,
    *,
    num_q_heads: int,
    decode: bool,
    soft_cap: float | None,
    sm_scale: float,
    tiles: GpuTiles,
) -> GpuShape:
    """Tiles of 128 keys if two of them fit, and as many in flight as fit, up to four."""
    for tile_tokens in (128, 64) if tiles.tile_tokens is None else (tiles.tile_tokens,):
        for stages in (4, 3, 2) if tiles.stages is None else (tiles.stages,):
            shape = GpuShape(
                layout=layout,
                num_q_heads=num_q_heads,
                decode=decode,
                soft_cap=soft_cap,
                sm_scale=sm_scale,
                blocks=tiles.blocks or multiprocessors(""),
                tile_tokens=tile_tokens,
                stages=stages,
            )
            if shape.smem_bytes() <= SMEM_BYTES:
                return shape
    return shape
