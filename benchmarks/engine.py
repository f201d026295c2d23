"""The engine on Gemma 3 270M and this machine's CPU: throughput, latency, host time, reuse.

    uv run python -m benchmarks.engine             # prints the tables
    uv run python -m benchmarks.engine --write     # and keeps them in engine.md
    ... --transformers /path/to/python             # compares with Hugging Face transformers

`--transformers` names the Python of an environment that has torch, transformers and gguf. What is
compared takes turns, each run in a process of its own.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.cpu import machine
from benchmarks.engine_runs import MAX_NUM_SEQS, RUNS, Record
from benchmarks.host_cost import CONTEXTS, host_cost
from benchmarks.tables import markdown_table
from benchmarks.workload import NEW_TOKENS, NUM_REQUESTS, PROMPT_TOKENS, mixed
from jaxattn.models.gemma3.checkpoint import resolve_model

LOAD = 0.7  # of the throughput: the rate of arrivals
SHARED_REQUESTS, SHARED_PREFIX = 64, 1024
HOST_SEQS = (32, 128, 256)
# Batch size and order of transformers' batches, the best of nine on 48 requests.
SETTINGS = ("32, by new tokens",)


def ours(run: str, **options: Any) -> Record:
    """A run of `engine_runs` in a process of its own."""
    return _json([sys.executable, "-m", "benchmarks.engine", "--run", run, json.dumps(options)])


def theirs(python: str, repeat: int, count: int) -> dict[str, Any]:
    """A run of transformers in its environment, with the same file of weights."""
    script = [python, "-m", "benchmarks.transformers_generate", str(resolve_model("gemma-3-270m"))]
    numbers = ["--repeat", str(repeat), "--count", str(count), "--settings", *SETTINGS]
    return _json([*script, *numbers], HF_HUB_OFFLINE="1")


def _json(command: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    return json.loads(done.stdout.splitlines()[-1])


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown_table(header, rows))


def throughput_table(runs: list[Record], peers: list[dict[str, Any]]) -> str:
    """Seconds and tokens/s of the mixed requests."""
    prompt, new = runs[0]["prompt tokens"], runs[0]["new tokens"]
    seconds = {
        "**jaxattn's engine**": [run["engine"] for run in runs],
        f"jaxattn, static batches of {MAX_NUM_SEQS}": [run["static"] for run in runs],
    }
    for setting in SETTINGS if peers else ():
        name = f"transformers, batches of {setting}"
        seconds[name] = [peer["seconds"][setting] for peer in peers]
    fastest = median(seconds["**jaxattn's engine**"])
    rows = [
        [
            name,
            f"{median(each):.1f}",
            f"{min(each):.1f} to {max(each):.1f}",
            f"{new / median(each):.1f}",
            f"{(prompt + new) / median(each):.0f}",
            f"{median(each) / fastest:.2f}x",
        ]
        for name, each in seconds.items()
    ]
    return _table(["", "s", "range", "new tokens/s", "all tokens/s", "time"], rows)


def latency_table(runs: list[Record]) -> str:
    """Percentiles in milliseconds."""
    rows = [
        [name, *(f"{median(run[f'{key} p{p}'] for run in runs) * 1e3:,.0f}" for p in (50, 90, 99))]
        for name, key in (("to the first token", "first"), ("between tokens", "between"))
    ]
    return _table(["ms", "p50", "p90", "p99"], rows)


def cost_table() -> str:
    """Milliseconds of the engine's thread in a step."""
    costs = {count: host_cost(count) for count in HOST_SEQS}
    parts = {
        "schedule": "schedule",
        "settle": "settle",
        "page tables": "page_table",
        "the rest of starting it": "dispatch",
        "**all**": "step",
    }
    rows = []
    for name, key in parts.items():
        values = [
            cost[key] - (cost["page_table"] if key == "dispatch" else 0) for cost in costs.values()
        ]
        rows.append([name, *(f"{value:.2f}" for value in values)])
    return _table(["ms", *(f"{count} sequences" for count in costs)], rows)


def prefix_table(runs: list[Record]) -> str:
    """Seconds with reuse on and off."""
    rows = [
        [
            name,
            f"{median(run[key] for run in runs):.1f}",
            f"{median(run[f'{key}, first'] for run in runs):.1f}",
            f"{median(run[f'{key}, hits'] / run['prompt tokens'] for run in runs):.0%}",
        ]
        for name, key in (("reuse", "on"), ("`prefix_reuse=False`", "off"))
    ]
    gain, sooner = (
        median(run[f"off{what}"] / run[f"on{what}"] for run in runs) for what in ("", ", first")
    )
    rows.append(["gain", f"**{gain:.1f}x**", f"**{sooner:.1f}x**", ""])
    return _table(["", "all done, s", "mean time to first token, s", "of prompts found"], rows)


TEXT = """\
# The engine on CPU

Measured {today} by `python -m benchmarks.engine` on {machine}, {cores} cores, Python {python},
jax {jax}{versions}; {repeats}. Load average at the start {load:.1f}; other processes
took at most {others:.0%} of the processor time of any run.
Gemma 3 270M (base model, the same GGUF file for all), bfloat16, greedy.

## Throughput

{count} requests: prompts of {prompt_low} to {prompt_high:,} tokens, {new_low} to {new_high} new
ones, both log-uniform from a fixed seed ({prompt_tokens:,} and {new_tokens:,} in all); nobody stops
early. The engine runs at most {seqs} at a time, all are there from the start. Static batches take
{seqs} in order and wait for the longest.{transformers}

{throughput}

## Latency under load

The same requests, arriving by a Poisson process at {rate:.2f} a second, {share:.0%} of the
throughput above; {running:.1f} ran at a time on average. A step with a chunk of a prompt takes
longer than one that only decodes: that is the gap between p50 and p99 between tokens.

{latency}

## The host's share of a step

{seqs} sequences decode, from 256 tokens on: a step takes {step_ms:.0f} ms, the host's part of
it is {host_ms:.1f} ms, **{host_share:.1%}** ({host_cpu:.1f} ms of processor time). It overlaps with
the device's.

What that part is, without a model, with {context_low:,} to {context_high:,} tokens in every
sequence: milliseconds of processor time of the engine's thread in a decode step.

{cost}

## Prefix reuse

{shared} requests at once that begin with the same {shared_prefix:,} tokens, go on for 16 to 128
of their own, and ask for 32 new ones.

{prefix}
"""

TRANSFORMERS = """
transformers' `generate` pads prompts on the left and runs a batch until its longest is done; only
the tokens that were asked for are counted. Sorted by new tokens it wastes less, as if all lengths
were known before: the best of nine settings is shown."""


def measure(options: argparse.Namespace) -> str:
    """Run everything; the page."""
    load = os.getloadavg()[0]
    runs, peers, shares, prefixes = [], [], [], []
    for repeat in range(options.repeats):
        runs.append(ours("throughput", repeat=repeat, count=options.count))
        if options.transformers:
            peers.append(theirs(options.transformers, repeat, options.count))
        shares.append(ours("host_share", repeat=repeat, new=100))
        prefixes.append(
            ours("prefix", repeat=repeat, count=SHARED_REQUESTS, prefix_tokens=SHARED_PREFIX)
        )
    rate = LOAD * options.count / median(run["engine"] for run in runs)
    late = [
        ours("latency", repeat=repeat, count=options.count, rate=rate)
        for repeat in range(options.repeats)
    ]
    requests = mixed(0, options.count)
    return TEXT.format(
        today=date.today(),
        machine=machine(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        jax=jax.__version__,
        versions="".join(f", {peer['versions']}" for peer in peers[:1]),
        repeats="each run once" if options.repeats == 1 else f"medians of {options.repeats}",
        load=load,
        others=max(run["others"] for run in (*runs, *shares, *prefixes, *late)),
        count=options.count,
        prompt_low=PROMPT_TOKENS[0],
        prompt_high=PROMPT_TOKENS[1],
        new_low=NEW_TOKENS[0],
        new_high=NEW_TOKENS[1],
        prompt_tokens=sum(len(each.prompt) for each in requests),
        new_tokens=sum(each.new for each in requests),
        seqs=MAX_NUM_SEQS,
        transformers=TRANSFORMERS if peers else "",
        throughput=throughput_table(runs, peers),
        rate=rate,
        share=LOAD,
        running=median(run["running"] for run in late),
        latency=latency_table(late),
        step_ms=median(run["step ms"] for run in shares),
        host_ms=median(run["host ms"] for run in shares),
        host_cpu=median(run["host CPU ms"] for run in shares),
        host_share=median(run["share"] for run in shares),
        context_low=CONTEXTS[0],
        context_high=CONTEXTS[1],
        cost=cost_table(),
        shared=SHARED_REQUESTS,
        shared_prefix=SHARED_PREFIX,
        prefix=prefix_table(prefixes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=NUM_REQUESTS, help="of the mixed requests")
    parser.add_argument("--transformers", metavar="PYTHON", help="of its environment")
    parser.add_argument("--write", action="store_true", help="keep the tables in engine.md")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "JSON"), help="one run, as JSON")
    options = parser.parse_args()
    if options.run:
        name, arguments = options.run
        print(json.dumps(RUNS[name](**json.loads(arguments))))
        return
    text = measure(options)
    print(text)
    if options.write:
        (Path(__file__).parent / "engine.md").write_text(text)


if __name__ == "__main__":
    main()
