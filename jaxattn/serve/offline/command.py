"""`jaxattn batch`: OpenAI's batch files, offline."""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxattn.options import add_engine_options, engine_options
from jaxattn.serve.offline.format import (
    ERROR_BEGINS,
    RESULT_BEGINS,
    Failure,
    Result,
    custom_id_in,
    encode_line,
    index_ids,
    line_of_result,
)
from jaxattn.serve.offline.interrupt import interrupt_asked
from jaxattn.serve.offline.jsonl import LineFile, check_regular, read_lines
from jaxattn.serve.offline.progress import BatchProgress

_DESCRIPTION = """
Serve the requests of a file in OpenAI's batch format: lines of {"custom_id": ..., "method":
"POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {...}}. Results are written
as they finish. A run that was interrupted continues where it stopped when the same command is
given again; so do requests that failed. A line that is no good goes to the errors file, with its
number and the reason, and the rest goes on. Exit status: 0 all requests have results; 1 some have
none, see the errors file, or the run could not go on; 2 usage; 130 interrupted.
"""


def add_parser(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "batch", help="serve a file of requests, offline", description=_DESCRIPTION
    )
    parser.set_defaults(run=_batch)
    parser.add_argument("input", type=Path, help="JSONL; with --ray also Parquet, or a folder")
    parser.add_argument("output", type=Path, help="JSONL; with --ray a folder of part files")
    parser.add_argument(
        "--errors",
        type=Path,
        help="lines without a result, as JSONL; written anew by every run (OUTPUT's name with "
        ".errors.jsonl)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help='what "model" is in bodies (that of --model)'
    )
    add_engine_options(parser)
    ray = parser.add_argument_group("Ray")
    ray.add_argument(
        "--ray",
        action="store_true",
        help="one engine for each of several workers, by Ray Data (pip install 'jaxattn[ray]'); "
        "paths are on a file system that all of them share",
    )
    ray.add_argument("--workers", type=int, help="engines (1)")
    ray.add_argument(
        "--worker-resources",
        type=_resources,
        metavar="JSON",
        help="what Ray is to reserve for a worker, such as '{\"TPU\": 4}' or '{\"GPU\": 1}' "
        "(one CPU)",
    )
    ray.add_argument(
        "--rows-per-part",
        type=int,
        help="requests of a part file: what a worker takes at a time, and what is done again if "
        "it is lost (128)",
    )
    ray.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="of a cluster (RAY_ADDRESS, or the cluster that this machine is in, or a new one)",
    )


def _batch(options: argparse.Namespace) -> int:
    if options.errors is None:
        options.errors = options.output.with_suffix(".errors.jsonl")
    if options.served_model_name is None:
        options.served_model_name = options.model
    _check_paths(options.input, options.output, options.errors)
    if options.ray:
        from jaxattn.serve.ray.data import run_on_ray

        return run_on_ray(options)
    for name in ("workers", "worker_resources", "rows_per_part", "ray_address"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --ray")
    return _run_here(options)


def _run_here(options: argparse.Namespace) -> int:
    """In this process, from file to file."""
    console = Console(stderr=True)
    version = _version(options.input)
    with console.status(f"reading {options.input}"):
        total, index = _index(options.input)
    with (
        LineFile(options.output, begins=RESULT_BEGINS) as results,
        LineFile(options.errors, begins=ERROR_BEGINS) as errors,
    ):
        with console.status(f"reading {options.output}"):
            done = _read_done(results, index, options.input)
        errors.clear()
        progress = BatchProgress(
            console, total=total, there=len(done), preparing="steps are compiled once"
        )
        try:
            complete = _complete(options, done, results, errors, progress)
        finally:
            errors.remove_if_empty()
    if _version(options.input) != version:
        raise ValueError(
            f"{options.input} changed while it was read: give the same command again for the rest"
        )
    if not complete:
        raise KeyboardInterrupt
    return 1 if progress.failed else 0


def _complete(
    options: argparse.Namespace,
    done: set[int],
    results: LineFile,
    errors: LineFile,
    progress: BatchProgress,
) -> bool:
    """Serve the lines that are not done. Returns False if Ctrl-C ended it."""
    from jaxattn.engine.llm import LLM
    from jaxattn.serve.offline.run import WINDOW, OfflineBatch, run

    if len(done) == progress.total:
        progress.print_summary(results=options.output, errors=options.errors)
        return True
    llm = LLM(**engine_options(options))
    print(llm.engine.describe_cache(), file=sys.stderr)
    batch = OfflineBatch(llm, model=options.served_model_name, seed=options.seed)

    def deliver(outcome: Result | Failure) -> None:
        if isinstance(outcome, Result):
            results.append(encode_line(outcome.record()))
            progress.done += 1
        else:
            errors.append(encode_line(outcome.record()))
            progress.failed += 1

    try:
        with progress, interrupt_asked() as asked:

            def stop() -> bool:
                progress.tokens = batch.num_tokens
                progress.show()
                return asked()

            lines = (each for each in read_lines(options.input) if each[0] not in done)
            window = WINDOW * options.max_num_seqs * options.data_parallel
            return run(batch, lines, deliver, window=window, stop=stop)
    finally:
        progress.print_summary(results=options.output, errors=options.errors)


def _check_paths(input: Path, output: Path, errors: Path) -> None:
    """Raise ValueError or OSError for an input that cannot be read, or one file in two roles."""
    for path in (input, output, errors):
        if re.match(r"\w+:/", str(path)):
            raise ValueError(f"{path} looks like a URL: give a path of a file system")
    if str(input) == "-":
        raise ValueError("the input is read twice, so it cannot be standard input: give a file")
    if not input.exists():
        raise FileNotFoundError(f"{input} does not exist")
    roles = {"input": input, "output": output, "errors": errors}
    for (role, path), (other_role, other) in itertools.combinations(roles.items(), 2):
        if path.resolve() == other.resolve():
            raise ValueError(f"{role} and {other_role} are both {path}: give each its own")


def _index(path: Path) -> tuple[int, dict[str, int]]:
    """The number of lines that are not blank, and the line number of every custom_id."""
    check_regular(path, "an input is read twice; folders and Parquet need --ray")
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: Parquet needs --ray")
    total = 0

    def lines() -> Iterator[tuple[int, str | None]]:
        nonlocal total
        for number, raw in read_lines(path):
            total += 1
            yield number, custom_id_in(raw)

    index = index_ids(lines(), where="line {}".format)
    return total, index


def _read_done(results: LineFile, index: dict[str, int], input: Path) -> set[int]:
    """Numbers of the input's lines that have a result."""
    done = set[int]()
    for number, raw in results.whole_lines():
        where = f"{results.path}, line {number}"
        done.add(line_of_result(custom_id_in(raw), index, done, where=where, input=input))
    return done


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _resources(text: str) -> dict[str, float]:
    """`{"CPU": 4, "TPU": 4}`: Ray's resources by their names."""
    try:
        resources = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(resources, dict) or not all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and amount >= 0
        for amount in resources.values()
    ):
        raise argparse.ArgumentTypeError(
            f'{text!r}: expected an object of names and amounts, such as {{"TPU": 4}}'
        )
    return resources
