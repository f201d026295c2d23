"""Whole Gemma 3 steps, compiled for a GPU that is not here: what they launch and allocate.

    uv run --isolated --no-dev --with-requirements benchmarks/gpu_requirements.txt \\
        python -m benchmarks.gpu_models --write     # updates benchmarks/gpu_models.md

The step is the engine's, sampling included, its cache donated. Of each model only the first LAYERS
layers: five with a window and one without. Ends with 1 if a step does not compile or breaks a
rule. Nothing runs, and nothing here is a speed.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_aot import CUSTOM_CALL, GPUS, Compiled, GpuCompilerMissingError, compile_cases
from benchmarks.gpu_schedule import LAUNCHED, TARGET, versions
from benchmarks.gpu_shapes import BACKEND
from benchmarks.tables import markdown_table
from benchmarks.tpu_aot import Case

LAYERS = 6
SEQS, MAX_LEN, PREFILL_TOKENS = 16, 8192, 1024
LEAST_POOL_BYTES = 8 * 10**6  # of a layer: the 1B's with a window
STEPS = {"decode": SEQS, "prefill": PREFILL_TOKENS}  # new tokens of a step


@dataclass(frozen=True)
class ModelStep:
    """One program: a model, and which step of it."""

    model: str
    step: str

    def case(self) -> Case:
        """The step to compile: that of benchmarks/tpu_models.py for this backend."""
        options = {
            "model": self.model,
            "chips": 1,
            "max_len": MAX_LEN,
            "tokens": STEPS[self.step],
            "seqs": SEQS,
            "layers": LAYERS,
            "backend": BACKEND,
        }
        name = f"{self.model}, {self.step}"
        return Case(name, "benchmarks.tpu_models:whole_step", options)


MODEL_STEPS = [ModelStep(model, step) for model in ("gemma-3-1b", "gemma-3-4b") for step in STEPS]


def faults(compiled: Compiled) -> list[str]:
    """Broken rules."""
    if compiled.error:
        return [f"does not compile: {compiled.error}"]
    out = []
    expected = {name: count * LAYERS for name, count in LAUNCHED.items()}
    if compiled.ours != expected:
        out.append(f"launches {compiled.ours}, expected {expected}")
    if compiled.copied_bytes >= LEAST_POOL_BYTES:
        out.append(f"{compiled.copied_bytes:,} bytes copied: a layer's pool?")
    spilled = [kernel for kernel in compiled.kernels if kernel.spill_bytes]
    out += [f"{kernel.name}: {kernel.spill_bytes} bytes spilled" for kernel in spilled]
    return list(dict.fromkeys(out))


def launches_of_a_layer(compiled: Compiled) -> float:
    """Launches from one layer's attention to the next one's."""
    calls = [place for place, kind in enumerate(compiled.launches) if kind == CUSTOM_CALL]
    ours = sum(LAUNCHED.values())
    return (calls[-ours] - calls[0]) / (LAYERS - 1)


HEADER = (
    "step",
    "decode a layer",
    "prefill a layer",
    "combine a layer",
    "all launches a layer",
    "launches of the step",
    "arguments MB",
    "donated MB",
    "temp MB",
    "largest copy MB",
)


def row(compiled: Compiled) -> tuple[str, ...]:
    """The line of one step."""
    sizes = compiled.argument_bytes, compiled.alias_bytes, compiled.temp_bytes
    return (
        compiled.case,
        *(f"{compiled.ours[name] / LAYERS:g}" for name in LAUNCHED),
        f"{launches_of_a_layer(compiled):.1f}",
        f"{len(compiled.launches)}",
        *(f"{size / 1e6:,.0f}" for size in sizes),
        f"{compiled.copied_bytes / 1e6:.2f}",
    )


def report(results: list[Compiled]) -> str:
    """The whole text."""
    broken = [f"- {each.case}: {fault}" for each in results for fault in faults(each)]
    return "\n".join(
        [
            "# Whole Gemma 3 steps on GPU, compiled ahead of time",
            "",
            f"Compiled for {GPUS[TARGET].name} by `python -m benchmarks.gpu_models` with "
            f"{versions()}; not run.",
            f"The first {LAYERS} layers of each model (one of them global), bfloat16, page size "
            f"32, pools for {SEQS} sequences of {MAX_LEN:,} tokens.",
            f"Decode: a token of every sequence; prefill: {PREFILL_TOKENS:,} new tokens.",
            "",
            *markdown_table(HEADER, [row(each) for each in results if not each.error]),
            "",
            *(["Broken rules:", "", *broken, ""] if broken else ["No rule is broken.", ""]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/gpu_models.md")
    options = parser.parse_args()
    results = []
    try:
        compiled = compile_cases(TARGET, [step.case() for step in MODEL_STEPS])
    except GpuCompilerMissingError as error:
        sys.exit(str(error))
    for each in compiled:
        print(f"{each.case}, {each.seconds:.0f} s: {faults(each) or 'good'}", file=sys.stderr)
        results.append(each)
    text = report(results)
    print(text)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(text)
    sys.exit(any(map(faults, results)))


if __name__ == "__main__":
    main()
