"""Whole Gemma 3 steps, compiled for TPUs that are not here: do they fit, and into how many bytes?

    python -m benchmarks.tpu_models --write     # updates benchmarks/tpu_models.md

1B on one chip, 27B on 4 and 8 chips: weights cut by heads, hidden units and vocabulary, the
attention kernels inside a `shard_map` over kv heads. The step is the engine's, sampling included.
Bytes are the compiler's, per chip. Nothing runs, and nothing here is a speed.
"""

import argparse
import dataclasses
import io
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.tpu_aot import Case, Compiled, compile_cases
from jaxattn import Target, group_layers
from jaxattn.cache.sizing import table_width, worst_demand
from jaxattn.engine.devices import mesh_of
from jaxattn.engine.program import Program
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.models.gemma3.sharding import abstract_weights, shared_config

DTYPE = "bfloat16"
PREFILL_TOKENS = 1024
SHAPES = (  # model, chips, sequences, and their length that pools are made for
    ("gemma-3-1b", 1, 16, 8192),
    ("gemma-3-27b", 4, 4, 4096),  # a v5e has 16 GB, of which the weights take 13.5
    ("gemma-3-27b", 8, 16, 8192),
)


def whole_step(
    target: Target,
    devices: tuple[Any, ...],
    *,
    model: str,
    chips: int,
    max_len: int,
    tokens: int,
    seqs: int,
    page_size: int = 32,
    layers: int | None = None,
    backend: str = "pallas_tpu",
) -> tuple[jax.stages.Wrapped, tuple, dict[str, int]]:
    """The engine's step of `tokens` new tokens of `seqs` sequences.

    `layers`: only so many of the model's.
    """
    config = CONFIGS[model]
    config = dataclasses.replace(config, layers=config.layers[:layers], vision=None)
    config = shared_config(config, chips)
    mesh = None if chips == 1 else mesh_of(devices[:chips], tensor_parallel=chips)
    weights: dict[str, Any] = abstract_weights(config, DTYPE, mesh)
    specs = layer_specs(config, page_size=page_size, kv_dtype=DTYPE, shards=chips)
    plan = group_layers(specs, max_len=max_len)
    limits = {"max_len": max_len, "step_tokens": tokens}
    program = Program(
        Gemma3(config, weights),
        plan,
        num_pages=[1 + need for need in worst_demand(plan, max_num_seqs=seqs, **limits)],
        widths=[table_width(plan, group, **limits) for group in range(len(plan.groups))],
        max_num_seqs=seqs,
        backend=backend,
        mesh=mesh,
        device=devices[0],
        target=target,
    )
    return program.step, program.arguments(tokens), {"num_tokens": tokens}


def cases() -> list[Case]:
    """Every model, number of chips and step."""
    return [
        Case(
            name=f"{model} on {chips}, {step}",
            builder="benchmarks.tpu_models:whole_step",
            options={
                "model": model,
                "chips": chips,
                "max_len": max_len,
                "tokens": tokens,
                "seqs": seqs,
            },
        )
        for model, chips, seqs, max_len in SHAPES
        for step, tokens in (("decode", seqs), ("prefill", PREFILL_TOKENS))
    ]


def table(results: list[Compiled]) -> Table:
    """Megabytes per chip."""
    columns = ("step", "target", "arguments", "of them donated", "temporary", "code")
    out = Table(*columns, box=box.SIMPLE, show_edge=False)
    for result in results:
        sizes = (
            result.argument_bytes,
            result.alias_bytes,
            result.temp_bytes,
            result.code_bytes,
        )
        cells = [result.error] if result.error else [f"{size / 1e6:,.0f}" for size in sizes]
        out.add_row(result.case, result.target, *cells)
    return out


def markdown(results: list[Compiled]) -> str:
    """The table as a page of its own, with the versions that it is true of."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(results))
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    pools = "; ".join(
        f"{model} on {chips}: {seqs} sequences of {length}" for model, chips, seqs, length in SHAPES
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    return (
        "# Whole Gemma 3 steps, compiled ahead of time\n\n"
        f"`python -m benchmarks.tpu_models --write`, {versions}. MB per chip, as the compiler "
        f"counts them; page size 32, bfloat16.\nDecode: a token of every sequence; prefill: "
        f"{PREFILL_TOKENS} new tokens. Pools: {pools} tokens.\nNothing was run.\n\n"
        f"```\n{text}\n```\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", default="v5e,v6e", help="v5e, v5p, v6e, tpu7x")
    parser.add_argument("--write", action="store_true", help="write benchmarks/tpu_models.md")
    options = parser.parse_args()
    results = []
    for target in options.targets.split(","):
        results += compile_cases(target, cases(), seconds_per_case=1200)
    Console(width=150).print(table(results))
    if options.write:
        Path(__file__).with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
