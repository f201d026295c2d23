"""What benchmarks/gpu.py does: numerics, the device's own rates, timings, rivals, their text."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.clock import Deadline, copy_bandwidth, matrix_rate
from benchmarks.gpu_batches import Work
from benchmarks.gpu_numerics import CHUNK, SMALL_CHUNK, TOLERANCE, small, verdict
from benchmarks.gpu_rivals import RIVALS, measured
from benchmarks.gpu_shapes import ROWS, Row
from benchmarks.gpu_times import (
    COMPARED_ROWS,
    COMPARED_WORKS,
    DECODE,
    PREFILL,
    TIMED,
    Device,
    call_seconds,
)
from benchmarks.tables import markdown_table
from jaxattn import Target

MINUTES = 10.0
NUMERICS_END, TIMINGS_END = 0.45, 0.8  # when they stop, as shares of the time
NUMERICS_HEADER = ("layer", "largest error", "")
TIMINGS_HEADER = ("layer", "work", "us", "visible KV, GB/s", "of copy", "TFLOP/s", "of matrix")
RIVALS_HEADER = ("layer", "work", "by", "us", "our time / its")


@dataclass
class Page:
    """What has been found so far."""

    numerics: list[tuple[str, ...]] = field(default_factory=list)
    timings: list[tuple[str, ...]] = field(default_factory=list)
    rivals: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: bool = False

    def text(self, title: str, rates: str) -> str:
        """All of it."""
        parts = [
            title,
            f"Against the float32 reference, `|difference| / (1 + |reference|)`, at most "
            f"{TOLERANCE}:",
            _table(NUMERICS_HEADER, self.numerics),
            rates,
            _table(TIMINGS_HEADER, self.timings),
            _table(RIVALS_HEADER, self.rivals),
            "Left out: " + ("; ".join(self.left_out) or "nothing") + ".",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(markdown_table(header, rows)) if rows else ""


def _show(table: list[tuple[str, ...]], *cells: str) -> None:
    table.append(cells)
    print(" | ".join(cells), file=sys.stderr, flush=True)


def numerics(
    page: Page, rows: list[Row], chunk: int, until: Deadline, options: dict[str, Any]
) -> None:
    """Every row of a planted batch against the reference."""
    for row in rows:
        if until.over:
            page.left_out.append(f"numerics of {row.name}")
            continue
        words, good = verdict(row, chunk, options)
        page.wrong |= not good
        _show(page.numerics, row.name, words, "" if good else "WRONG")


def timings(page: Page, device: Device, until: Deadline) -> dict[tuple[Row, Work], float]:
    """Decode and prefill of every row that is timed, beside the device's own rates."""
    taken: dict[tuple[Row, Work], float] = {}
    for row, works in [(row, DECODE) for row in TIMED] + [(row, PREFILL) for row in COMPARED_ROWS]:
        try:
            for work, result in call_seconds(row, device, works, until):
                if isinstance(result, str):
                    page.left_out.append(f"{row.name}, {work.name}: {result}")
                    continue
                taken[row, work] = result
                _show(page.timings, row.name, work.name, *_rates(row, work, result, device))
        except Exception as error:  # such as no memory: the next row's turn
            page.left_out.append(f"{row.name}: {type(error).__name__}: {str(error)[:200]}")
    return taken


def _rates(row: Row, work: Work, taken: float, device: Device) -> tuple[str, ...]:
    window = row.sliding_window
    rate = work.visible(window) * row.token_bytes / taken
    flops = row.flops(work.pairs(window)) / taken
    return (
        f"{taken * 1e6:,.1f}",
        f"{rate / 1e9:,.0f}",
        f"{rate / device.copy:.0%}",
        f"{flops / 1e12:,.1f}",
        f"{flops / device.matrix:.0%}",
    )


def rivals(page: Page, ours: dict[tuple[Row, Work], float], until: Deadline) -> None:
    """Others on the same work, in bfloat16."""
    for name in RIVALS:
        for row, work in ((row, work) for row in COMPARED_ROWS for work in COMPARED_WORKS):
            if until.over:
                page.left_out.append(f"{name}: {row.name}, {work.name}")
                continue
            result = measured(name, row, work)
            if isinstance(result, str):
                _show(page.rivals, row.name, work.name, name, result, "-")
                if result.startswith("not installed"):
                    break
                continue
            ratio = f"{ours[row, work] / result:.2f}" if (row, work) in ours else "-"
            _show(page.rivals, row.name, work.name, name, f"{result * 1e6:,.1f}", ratio)


def interpreted(only: str, until: Deadline) -> Page:
    """Numerics alone, on a CPU, with small rows."""
    page = Page()
    rows = [small(row) for row in ROWS if only in row.name]
    options = {"interpret": plgpu.InterpretGPUParams(), "target": Target.gpu("h100")}
    numerics(page, rows, SMALL_CHUNK, until, options)
    return page


def _hopper() -> Any | None:
    try:
        device: Any = jax.devices("cuda")[0]
    except RuntimeError:  # no driver, no plugin or no device
        return None
    return device if str(device.compute_capability).startswith("9.") else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on a GPU: numerics, then times.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after these it stops")
    parser.add_argument("--write", action="store_true", help="keep the text in gpu.md")
    parser.add_argument("--interpret", action="store_true", help="numerics alone, with no GPU")
    parser.add_argument("--only", default="", help="numerics of rows with this in their name")
    options = parser.parse_args()
    if options.write and (options.interpret or options.only):
        parser.error("--write keeps everything, and --interpret and --only leave things out")
    jax.config.update("jax_platforms", "cpu" if options.interpret else "cuda,cpu")
    if options.interpret:  # a block's threads are the host's, and all must run at once
        os.environ.setdefault("NPROC", "8")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # rivals need memory too
    seconds = 60 * options.minutes
    numerics_end, timings_end, end = (
        Deadline(share * seconds) for share in (NUMERICS_END, TIMINGS_END, 1.0)
    )
    if options.interpret:
        page = interpreted(options.only, end)
        print(page.text("# Attention for GPU, interpreted", ""))
        sys.exit(page.wrong)
    device = _hopper()
    if device is None:
        print("no GPU for these kernels: they need an H100 or H200 and `jax[cuda13]`")
        sys.exit(2)
    title = (
        f"# Attention on GPU\n\nMeasured {date.today()} by `python benchmarks/gpu.py` on one "
        f"{device.device_kind}, jax {jax.__version__}."
    )
    page, rates = Page(), ""
    numerics(page, [row for row in ROWS if options.only in row.name], CHUNK, numerics_end, {})
    if not page.wrong:
        memory = (device.memory_stats() or {}).get("bytes_limit", 32 * 10**9)
        own = Device(memory, copy_bandwidth(), matrix_rate())
        rates = (
            f"A plain copy reads and writes {own.copy / 1e9:,.0f} GB/s; a bfloat16 matrix product "
            f"reaches {own.matrix / 1e12:,.0f} TFLOP/s."
        )
        ours = timings(page, own, timings_end)
        rivals(page, ours, end)
    else:
        page.left_out.append("all timings: a row is wrong")
    text = page.text(title, rates)
    print(text)
    if options.write:
        Path(__file__).with_name("gpu.md").write_text(text)
    sys.exit(page.wrong)
