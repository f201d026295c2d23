"""What the GPU compiler makes of the attention kernels, with no GPU: registers, spills, opcodes.

    uv run --isolated --no-dev --with-requirements benchmarks/gpu_requirements.txt \\
        python -m benchmarks.gpu_schedule             # prints the tables
        python -m benchmarks.gpu_schedule --write     # and keeps them, .md and .json
        python -m benchmarks.gpu_schedule --check     # and compares with what was kept

Ends with 1 if something did not compile, broke a rule or, with --check, changed.
benchmarks/README.md explains the columns.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_aot import GPUS, Compiled, GpuCompilerMissingError, compile_cases
from benchmarks.gpu_shapes import POOL_TOKENS, QUERY_DTYPE, ROWS, SEQS, TOKENS, Row
from benchmarks.sass import Kernel
from benchmarks.tables import markdown_table
from jaxattn.kernels.pallas.gpu_shape import GpuShape

HERE = Path(__file__)
TARGET = "h100"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
DECODE, PREFILL, COMBINE = "jaxattn_decode", "jaxattn_prefill", "jaxattn_combine"
# HGMMA multiplies, UTMALDG and UTMASTG are bulk copies in and out.
WANTED = {DECODE: ("HGMMA", "UTMALDG", "UTMASTG"), COMBINE: ("UTMASTG",)}
WANTED[PREFILL] = WANTED[DECODE]
# An older matrix unit's instructions, and memory where registers are spilled to.
UNWANTED = ("HMMA", "IMMA", "LDL", "STL")
KEPT = ("HGMMA", "UTMALDG", "UTMASTG", *UNWANTED)
LAUNCHED = {DECODE: 1, PREFILL: 1, COMBINE: 2}
# How far a number may go from the one kept before --check reports it.
REGISTERS, FRACTION = 8, 0.1


@dataclass(frozen=True)
class Result:
    """A row and what became of it."""

    row: Row
    compiled: Compiled

    @property
    def kernels(self) -> dict[str, Kernel]:
        """By name; decode, its combine, prefill and its combine follow each other."""
        out: dict[str, Kernel] = {}
        phase = ""
        for kernel in self.compiled.kernels:
            phase = phase if kernel.name == COMBINE else kernel.name
            suffix = f" after {phase.removeprefix('jaxattn_')}" if kernel.name == COMBINE else ""
            out[kernel.name + suffix] = kernel
        return out

    @property
    def shapes(self) -> dict[str, GpuShape]:
        """What the kernels that attend were made for."""
        return {DECODE: self.row.shape(decode=True), PREFILL: self.row.shape(decode=False)}

    @property
    def pool_bytes(self) -> int:
        """Of the pages without the null page."""
        return POOL_TOKENS * self.row.token_bytes

    @property
    def partial_bytes(self) -> int:
        """Of the partial results of both launches, of which XLA may keep one at a time."""
        return sum(
            2 * shape.blocks * shape.rows * 4 * (shape.lane_tiles * shape.lanes + 2)
            for shape in self.shapes.values()
        )

    def faults(self) -> list[str]:
        """Broken rules, which no comparison with an earlier state excuses."""
        if self.compiled.error:
            return [f"does not compile: {self.compiled.error}"]
        out = []
        for name, kernel in self.kernels.items():
            out += [f"{name}: {fault}" for fault in self._kernel_faults(kernel)]
        if self.compiled.ours != LAUNCHED:
            out.append(f"launches {self.compiled.ours}, expected {LAUNCHED}")
        if self.compiled.alias_bytes < self.pool_bytes:
            out.append("the pool is not updated in place")
        if self.compiled.temp_bytes > self.partial_bytes + self.pool_bytes // 8:
            out.append(f"{self.compiled.temp_bytes:,} temporary bytes: a copy of the pool?")
        if self.compiled.copied_bytes > self.pool_bytes // 8:
            out.append(f"{self.compiled.copied_bytes:,} bytes copied")
        return out

    def _kernel_faults(self, kernel: Kernel) -> list[str]:
        out = [f"no {opcode}" for opcode in WANTED[kernel.name] if not kernel.count(opcode)]
        out += [f"{opcode} {n}" for opcode in UNWANTED if (n := kernel.count(opcode))]
        if kernel.spill_bytes:
            out.append(f"{kernel.spill_bytes} bytes spilled")
        if kernel.losses:
            out.append(f"the assembler warns of {kernel.losses} performance losses")
        shape = self.shapes.get(kernel.name)
        shared, there_are = kernel.smem_bytes or 0, GPUS[TARGET].smem_bytes
        if shape and shared > shape.smem_bytes():
            out.append(f"{shared:,} bytes shared, estimated {shape.smem_bytes():,}")
        if shared > there_are:
            out.append(f"{shared:,} bytes shared, of {there_are:,}")
        return out

    def kept(self) -> dict[str, Any]:
        """What --check compares."""
        kernels = {}
        for name, kernel in self.kernels.items():
            opcodes = {opcode: kernel.count(opcode) for opcode in KEPT if kernel.count(opcode)}
            kernels[name] = asdict(kernel) | {"opcodes": opcodes}
        fields = ("ours", "temp_bytes", "peak_bytes")
        program = {name: getattr(self.compiled, name) for name in fields}
        return program | {"launches": len(self.compiled.launches), "kernels": kernels}


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed by more than it may, of one row's `Result.kept`."""
    out = []

    def compare(name: str, before: int, after: int, allowed: float) -> None:
        if abs(after - before) > allowed:
            out.append(f"{name} {before:,} -> {after:,}")

    if kept["kernels"].keys() != now["kernels"].keys():
        return [f"kernels {sorted(kept['kernels'])} -> {sorted(now['kernels'])}"]
    for name, before in kept["kernels"].items():
        after = now["kernels"][name]
        compare(f"{name}: registers", before["registers"], after["registers"], REGISTERS)
        for number in ("instructions", "smem_bytes"):
            allowed = FRACTION * before[number]
            compare(f"{name}: {number}", before[number], after[number], allowed)
        for opcode in sorted(before["opcodes"].keys() ^ after["opcodes"].keys()):
            is_there = opcode in after["opcodes"]
            out.append(f"{name}: {opcode} {'appeared' if is_there else 'disappeared'}")
    if kept["ours"] != now["ours"]:
        out.append(f"launches of ours {kept['ours']} -> {now['ours']}")
    for number in ("launches", "temp_bytes", "peak_bytes"):
        compare(number, kept[number], now[number], allowed=FRACTION * kept[number])
    return out


KERNEL_HEADER = (
    "layer",
    "kernel",
    "registers",
    "spilled B",
    "shared B",
    "estimated B",
    "keys x stages",
    "HGMMA",
    "UTMALDG",
    "UTMASTG",
    "instructions",
)
PROGRAM_HEADER = (
    "layer",
    "ours",
    "all launches",
    "partials MiB",
    "temp MiB",
    "largest copy MiB",
    "pool MiB",
    "peak MiB",
)


def kernel_rows(results: list[Result]) -> list[tuple[str, ...]]:
    """A line for every kernel of every row, but for combines like one that is there already."""
    out: list[tuple[str, ...]] = []
    for result in results:
        for name, kernel in result.kernels.items():
            shape = result.shapes.get(kernel.name)
            cells = (
                name.removeprefix("jaxattn_"),
                f"{kernel.registers}",
                f"{kernel.spill_bytes}",
                f"{kernel.smem_bytes or 0:,}",
                f"{shape.smem_bytes():,}" if shape else "-",
                f"{shape.tile_tokens} x {shape.stages}" if shape else "-",
                *(f"{kernel.count(opcode)}" for opcode in WANTED[DECODE]),
                f"{kernel.instructions:,}",
            )
            if shape or all(cells != line[1:] for line in out):
                out.append((result.row.name, *cells))
    return out


def program_row(result: Result) -> tuple[str, ...]:
    """The line of a row's program."""
    compiled = result.compiled
    sizes = (
        result.partial_bytes,
        compiled.temp_bytes,
        compiled.copied_bytes,
        result.pool_bytes,
        compiled.peak_bytes,
    )
    return (
        result.row.name,
        f"{sum(compiled.ours.values())}",
        f"{len(compiled.launches)}",
        *(f"{size / 2**20:,.1f}" for size in sizes),
    )


def versions() -> str:
    """Of what compiled."""
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def report(results: list[Result]) -> str:
    """The whole text."""
    good = [each for each in results if not each.compiled.error]
    faults = [f"- {each.row.name}: {fault}" for each in results for fault in each.faults()]
    return "\n".join(
        [
            "# Schedules on GPU",
            "",
            f"Compiled for {GPUS[TARGET].name} by `python -m benchmarks.gpu_schedule` with "
            f"{versions()};",
            f"not run on a GPU. A mixed batch: {SEQS} sequences, {TOKENS} tokens, queries in "
            f"{QUERY_DTYPE}.",
            "",
            *markdown_table(KERNEL_HEADER, kernel_rows(good)),
            "",
            *markdown_table(PROGRAM_HEADER, [program_row(each) for each in good]),
            "",
            *(["Broken rules:", "", *faults, ""] if faults else ["No rule is broken.", ""]),
        ]
    )


def schedule(rows: list[Row]) -> list[Result]:
    """Compile the rows, telling how it goes."""
    results = []
    compiled = compile_cases(TARGET, [row.case() for row in rows])
    for row, each in zip(rows, compiled, strict=True):
        results.append(Result(row, each))
        faults = "; ".join(results[-1].faults()) or "good"
        print(f"{row.name}, {each.seconds:.0f} s: {faults}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the tables, as .md and .json")
    parser.add_argument("--check", action="store_true", help="compare with the .json that was kept")
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write keeps all rows, and --only leaves some out")
    rows = [row for row in ROWS if options.only in row.name]
    if not rows:
        parser.error(f"--only {options.only}: the rows are {'; '.join(row.name for row in ROWS)}")
    try:
        results = schedule(rows)
    except GpuCompilerMissingError as error:
        sys.exit(str(error))
    print(report(results))
    bad = any(each.faults() for each in results)
    now = {each.row.name: each.kept() for each in results}
    if options.check:
        kept = json.loads(HERE.with_suffix(".json").read_text())
        kept = {name: each for name, each in kept.items() if options.only in name}
        for name in sorted(kept.keys() | now.keys()):
            if name in kept and name in now:
                changes = differences(kept[name], now[name])
            else:
                changes = ["not kept yet" if name in now else "not a row any more"]
            print(*(f"changed: {name}: {change}\n" for change in changes), sep="", end="")
            bad |= bool(changes)
    if options.write:
        HERE.with_suffix(".md").write_text(report(results))
        HERE.with_suffix(".json").write_text(json.dumps(now, indent=1) + "\n")
    sys.exit(bad)


if __name__ == "__main__":
    main()
