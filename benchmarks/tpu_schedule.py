"""What the TPU compiler makes of the attention kernels: bundles, beside the chip's floors.

    uv run python -m benchmarks.tpu_schedule            # prints the table, no TPU needed
    uv run python -m benchmarks.tpu_schedule --write    # and keeps it in benchmarks/tpu_schedule.md

The numbers are the compiler's, so they do not vary from run to run. benchmarks/README.md explains
them.
"""

import argparse
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.bundles import Kernel, Loop
from benchmarks.rpa_v3 import NAME as RPA_V3
from benchmarks.rpa_v3 import rpa_v3
from benchmarks.tpu_aot import Case, Compiled, compile_cases
from benchmarks.tpu_shapes import DTYPE, LAYERS, Layer
from jaxattn.kernels.layout import KVLayout
from jaxattn.kernels.pallas.tiles import CHIPS, Chip, Tiles, choose_tiles
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillShape

TARGETS = ("v5e", "v6e", "tpu7x")
# GHz, assumed: no data sheet states them. 1.5 is v5e's peak over 4 x 128 x 128 multiply-adds.
CLOCK_GHZ = {"v5e": 1.5, "v6e": 1.75, "tpu7x": 2.2}
SEQS, TOKENS, TABLE_TOKENS, LONG_TABLE_TOKENS = 64, 256, 4096, 131_072
Q_TOKENS, KV_TOKENS = 128, 512  # prefill is counted per so many queries and keys
PARTIAL = "partial_tile"  # kernels put what a full tile skips into a named scope of this name

WINDOWED, GLOBAL = "windowed decode", "global decode"
INTERIOR, EDGE, TILE = "prefill, interior", "prefill, edge", "prefill, with its tile"
KERNELS = {
    WINDOWED: "jaxattn_decode_window",
    GLOBAL: "jaxattn_decode",
    **dict.fromkeys((INTERIOR, EDGE, TILE), "jaxattn_prefill"),
}


@dataclass(frozen=True)
class Cell:
    """A layer, how it is called, and what is read of the kernel (a key of `KERNELS`)."""

    work: str
    layer: Layer
    page_size: int
    table_tokens: int = TABLE_TOKENS

    @property
    def sliding_window(self) -> int | None:
        return None if self.work == GLOBAL else self.layer.sliding_window

    @property
    def case(self) -> Case:
        """The call to compile. A mixed batch has both kernels, so that cells share it."""
        options = {
            "num_q_heads": self.layer.num_q_heads,
            "num_kv_heads": self.layer.num_kv_heads,
            "head_dim": self.layer.head_dim,
            "sliding_window": self.sliding_window,
            "page_size": self.page_size,
            "table_tokens": self.table_tokens,
            "seqs": SEQS,
            "tokens": TOKENS,
        }
        name = f"{self.layer.name}, W {self.sliding_window}, page {self.page_size}"
        return Case(f"{name}, {self.table_tokens}", "benchmarks.tpu_shapes:ragged_call", options)


def cells() -> list[Cell]:
    """The rows of the table."""
    out = []
    for layer in LAYERS:
        out += [Cell(WINDOWED, layer, page_size) for page_size in (16, 32)]
        out += [Cell(GLOBAL, layer, page_size) for page_size in (16, 32)]
        if layer == LAYERS[0]:  # pages of 16 would need 2 MiB of scalar memory for the table
            out.append(Cell(GLOBAL, layer, 128, LONG_TABLE_TOKENS))
        out += [Cell(work, layer, 16) for work in (INTERIOR, EDGE, TILE)]
    return out


@dataclass(frozen=True)
class Pass:
    """What one pass of a hot loop does, in units of the cell's work, by the kernels' own rules."""

    units: float
    queries: int  # of a unit, and its keys
    keys: int
    blocks: int = 1  # blocks of queries that share a tile of keys
    block_units: float = 1.0  # units of one block of queries and a tile


def one_pass(cell: Cell, chip: Chip) -> Pass:
    """A unit is a sequence, a KV token, or 128 queries x 512 keys of all heads."""
    layer = cell.layer
    layout = KVLayout(
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=cell.page_size,
        dtype=DTYPE,
    )
    decode_tiles, prefill_tiles = choose_tiles(
        layout,
        most_tokens=cell.sliding_window,
        num_q_heads=layer.num_q_heads,
        query_dtype=DTYPE,
        chip=chip,
        override=Tiles(),
        num_seqs=SEQS,
    )
    if cell.work == WINDOWED:
        return Pass(1.0, 1, layer.sliding_window)
    if cell.work == GLOBAL:
        return Pass(decode_tiles.tile_tokens, 1, 1)
    shape = PrefillShape(
        layout=layout,
        num_q_heads=layer.num_q_heads,
        query_dtype=DTYPE,
        sm_scale=1.0,
        sliding_window=layer.sliding_window,
        soft_cap=None,
        image_rule="none",
        causal=True,
        update_kv_cache=True,
        table_width=cell.table_tokens // cell.page_size,
        tiles=prefill_tiles,
        interpret=False,
    )
    block_units = prefill_tiles.block_q / Q_TOKENS * prefill_tiles.block_kv / KV_TOKENS
    units = block_units / shape.units  # a pass takes some heads only
    return Pass(units, Q_TOKENS, KV_TOKENS, prefill_tiles.blocks, block_units)


def hot_loop(kernel: Kernel, work: str) -> Loop:
    """The loop that a cell counts. Prefill has two, of which that with masks is the larger."""
    loops = kernel.hot_loops()
    expected = 1 if work in (WINDOWED, GLOBAL) else 2
    if len(loops) != expected:
        raise ValueError(f"{kernel.name!r} has {len(loops)} loops that compute, not {expected}")
    return loops[0] if work == EDGE else loops[-1]


def around_loop(kernel: Kernel, one: Pass) -> float:
    """Bundles per unit of the loops around prefill's two: over blocks of queries, and over tiles.

    The second loop unpacks a tile once for all its blocks.
    """
    loops = kernel.hot_loops()
    block = kernel.around(loops[0])
    tile = kernel.around(block)
    own = block.bundles - sum(loop.bundles for loop in loops)
    return (own + (tile.bundles - block.bundles) / one.blocks) / one.block_units


HEADER = (
    "TPU",
    "layer",
    "work",
    "page",
    "table",
    "bundles",
    "full tile",
    "spills + fills",
    "full tile's",
    "HBM floor",
    "FLOP floor",
    "bound by",
    RPA_V3,
    "its spills + fills",
    "ours / its",
    "temp MiB",
)


def row(cell: Cell, one: Pass, plain: Compiled, traced: Compiled) -> str:
    """One line of the table; ValueError if the cell did not compile or has other loops."""
    kernel, marked = (each.kernel(KERNELS[cell.work]) for each in (plain, traced))
    loop = hot_loop(kernel, cell.work)
    skipped = marked.in_scope(PARTIAL, hot_loop(marked, cell.work))
    chip, clock = CHIPS[plain.target], CLOCK_GHZ[plain.target]
    bundles = loop.bundles / one.units
    if cell.work == TILE:
        bundles += around_loop(kernel, one)
    full = bundles - sum(scope.bundles for scope in skipped) / one.units
    full_spills = loop.spills - sum(scope.spills for scope in skipped)
    hbm = one.keys * cell.layer.token_bytes / one.blocks / chip.hbm_gb_per_s * clock
    flop = cell.layer.flops(one.queries, one.keys) / chip.bf16_tflops / 1000 * clock
    peer = rpa_v3(plain.target, cell.layer.name, cell.work.partition(",")[0])
    columns = (
        plain.target,
        cell.layer.name,
        cell.work,
        f"{cell.page_size}",
        f"{cell.table_tokens:,}",
        _number(bundles),
        _number(full) if skipped else "-",
        f"{loop.spills:,}",
        f"{full_spills:,}" if skipped else "-",
        _number(hbm),
        _number(flop),
        "bandwidth" if hbm >= full else "compute",
        _number(peer.bundles) if peer else "-",
        f"{peer.spills:,}" if peer else "-",
        f"{full / peer.bundles:.2f}" if peer else "-",
        f"{plain.temp_bytes / 2**20:.1f}",
    )
    return _line(columns)


def _line(columns: tuple[str, ...]) -> str:
    return "| " + " | ".join(columns) + " |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(target: str) -> tuple[list[str], list[str]]:
    """Rows of one target, and what did not compile or could not be read."""
    rows, failures = [], []
    wanted = {cell: one_pass(cell, CHIPS[target]) for cell in cells()}
    cases = list({cell.case.name: cell.case for cell in wanted}.values())
    plain = {each.case: each for each in compile_cases(target, cases, read="schedule")}
    traced = {each.case: each for each in compile_cases(target, cases, read="scopes")}
    for cell, one in wanted.items():
        try:
            rows.append(row(cell, one, plain[cell.case.name], traced[cell.case.name]))
        except ValueError as error:
            failures.append(f"- {target}, {cell.layer.name}, {cell.work}: {error}")
    return rows, failures


def report(targets: tuple[str, ...]) -> tuple[str, bool]:
    """The whole text, and whether every row is there."""
    rows, failures = [], []
    for target in targets:
        more, wrong = table(target)
        rows += more
        failures += wrong
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    clocks = ", ".join(f"{name} {CLOCK_GHZ[name]}" for name in targets)
    lines = [
        "# Schedules on TPU",
        "",
        f"Compiled by `python -m benchmarks.tpu_schedule` with {versions}; not run on a TPU.",
        f"{SEQS} sequences, {TOKENS} tokens, {DTYPE}. Floors assume clocks (GHz) of {clocks}.",
        "",
        "Units: windowed decode, per sequence; global decode, per KV token; prefill, per "
        f"{Q_TOKENS} queries x {KV_TOKENS} keys. Spills + fills: of one pass of the loop.",
        "",
        _line(HEADER),
        _line(("---",) * len(HEADER)),
        *rows,
        "",
    ]
    if failures:
        lines += ["Missing rows:", "", *failures, ""]
    return "\n".join(lines), not failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the table in tpu_schedule.md")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one")
    options = parser.parse_args()
    text, complete = report(tuple(options.target or TARGETS))
    print(text)
    if options.write:
        (Path(__file__).parent / "tpu_schedule.md").write_text(text)
    sys.exit(not complete)


if __name__ == "__main__":
    main()
