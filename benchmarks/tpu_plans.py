"""What `jaxattn plan --target` says of every Gemma 3 on slices of one and of eight chips.

    python -m benchmarks.tpu_plans --write                          # all, into tpu_plans.md
    python -m benchmarks.tpu_plans --write --missing                # those that are not there yet
    python -m benchmarks.tpu_plans --write --models gemma-3-27b --targets v5e-8

Every plan is written as soon as it is there, so that a run that is stopped can go on. Compiled
ahead of time; nothing runs, and nothing here is a speed.
"""

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console

from jaxattn.engine.target_plan import DoesNotFitError, Wanted, plan_target
from jaxattn.engine.target_report import report

PAGE = Path(__file__).with_suffix(".md")
MODELS = ("gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b")
TARGETS = ("v5e-1", "v5e-8", "v6e-1", "v6e-8")
MAX_LEN, BATCH = 32768, 8
HEAD = f"""\
# Gemma 3 on TPU slices that are not here

`python -m benchmarks.tpu_plans --write`: what

    jaxattn plan --model M --target T --max-len {MAX_LEN} --batch {BATCH}

prints for {len(MODELS)} models and {len(TARGETS)} slices. The engine's own decode and prefill
steps, compiled ahead of time. Nothing was run: bytes are the compiler's, speeds are bounds.
"""


def plan(model: str, target: str) -> str:
    """The printed plan, or why there is none."""
    try:
        planned = plan_target(Wanted(model=model, max_len=MAX_LEN, batch=BATCH), target)
        steps = planned.compile(seconds=7200)
    except DoesNotFitError as error:
        return f"does not fit: {error}"
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report(planned, steps))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def sections() -> dict[str, str]:
    """What the page has, by heading."""
    if not PAGE.exists():
        return {}
    return dict(re.findall(r"^## ([^\n]*)\n\n```\n(.*?)\n```$", PAGE.read_text(), re.M | re.S))


def write(plans: dict[str, str]) -> None:
    """The page, in the order of the tables of models and targets."""
    order = [heading(model, target) for model in MODELS for target in TARGETS]
    parts = [f"## {name}\n\n```\n{plans[name]}\n```\n" for name in order if name in plans]
    PAGE.write_text("\n".join([HEAD, *parts]))


def heading(model: str, target: str) -> str:
    """Of a section."""
    return f"{model} on {target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--missing", action="store_true", help="only what the page does not have")
    parser.add_argument("--write", action="store_true", help="write benchmarks/tpu_plans.md")
    options = parser.parse_args()
    for model in options.models.split(","):
        for target in options.targets.split(","):
            name, plans = heading(model, target), sections()
            if options.missing and name in plans:
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            text = plan(model, target)
            print(f"{text}\n", flush=True)
            if options.write:
                write(plans | {name: text})


if __name__ == "__main__":
    main()
