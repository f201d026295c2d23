"""`jaxattn batch --ray`: a batch on Ray Data, with one engine for each worker."""

import argparse
import itertools
import json
import logging
import math
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxattn.options import engine_options
from jaxattn.serve.offline.format import ERROR_BEGINS, encode_line
from jaxattn.serve.offline.jsonl import LineFile, lock
from jaxattn.serve.offline.progress import BatchProgress
from jaxattn.serve.offline.run import WINDOW
from jaxattn.serve.ray.input import FORMATS, BatchInput, Part, plan_input, read_part_texts
from jaxattn.serve.ray.output import count_finished

_ROWS_PER_PART = 128
_MAX_DEATHS = 8  # of workers in a row that were just starting
_RAY_NAMES = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # others are `resources`


def run_on_ray(options: argparse.Namespace) -> int:
    """Serve an input on the workers of a Ray cluster. Returns the exit status."""
    from jaxattn.models.gemma3.checkpoint import load_config

    ray = _import_ray()
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers}: expected at least 1")
    load_config(options.model)  # refuses what is no model before workers start
    console = Console(stderr=True)
    input, folder = options.input.resolve(), options.output.resolve()
    rows = _ROWS_PER_PART if options.rows_per_part is None else options.rows_per_part
    with console.status(f"reading {input}"):
        plan = plan_input(input, rows)
    extension = folder.suffix[1:] if folder.suffix[1:] in FORMATS else plan.format
    with _locked(folder), LineFile(options.errors, begins=ERROR_BEGINS) as errors:
        count = partial(count_finished, folder, plan, extension=extension, input=input)
        with console.status(f"reading {folder}"):
            counts = count()
        errors.clear()
        pending = [number for number, part in enumerate(plan.parts) if counts[number] < part.count]
        progress = BatchProgress(
            console, total=plan.total, there=sum(counts), preparing="workers start"
        )
        try:
            if not pending:
                return 0
            reports = _reports(ray, options, plan, pending, folder, extension)
            with progress, closing(reports):
                for report in reports:
                    number = report["part"]
                    progress.done += report["finished"] - counts[number]
                    progress.tokens += report["tokens"]
                    for failure in report["failures"]:
                        if input.is_dir():
                            failure["file"] = plan.parts[number].source
                        errors.append(encode_line(failure))
                        progress.failed += 1
                    progress.show()
        except BaseException:
            progress.done = sum(count()) - progress.there  # also of parts that nobody reported
            raise
        finally:
            errors.remove_if_empty()
            progress.print_summary(results=options.output, errors=options.errors)
    return 1 if progress.failed else 0


def _reports(
    ray: Any,
    options: argparse.Namespace,
    plan: BatchInput,
    pending: list[int],
    folder: Path,
    extension: str,
) -> Generator[dict[str, Any]]:
    """Complete the pending parts; what `Worker` reports of each, as it ends."""
    from jaxattn.models.gemma3.checkpoint import expanded
    from jaxattn.serve.ray.worker import Worker

    llm = engine_options(options)
    if (path := expanded(llm["model"])).exists():
        llm["model"] = str(path.resolve())
    workers = min(1 if options.workers is None else options.workers, len(pending))
    rows = max(plan.parts[number].count for number in pending)
    window = WINDOW * options.max_num_seqs * options.data_parallel
    calls = 1 + math.ceil(window / 2 / rows)  # while one part ends, others keep the engine full

    def read(shard: dict[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = json.loads(shard["parts"])
        parts = [Part(**each) for each in numbers.values()]
        for number, (part, text) in zip(numbers, read_part_texts(parts), strict=True):
            file = f"{part.name}.{extension}"
            yield {"part": int(number), "file": file, "first": part.first, "text": text}

    ray.init(address=options.ray_address, include_dashboard=False, logging_level=logging.ERROR)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # ours is shown
        context.target_max_block_size = 1  # a part is a task of its own
        context.max_consecutive_actor_init_deaths = _MAX_DEATHS
        reports = (
            ray.data.from_items(_shards(plan, pending))
            .flat_map(read, num_cpus=0, compute=ray.data.TaskPoolStrategy(size=1))
            .map_batches(
                Worker,
                batch_size=1,
                batch_format="pyarrow",
                fn_constructor_kwargs={
                    "llm": llm,
                    "model": options.served_model_name,
                    "folder": str(folder),
                    "window": window,
                },
                compute=ray.data.ActorPoolStrategy(
                    size=workers,
                    max_tasks_in_flight_per_actor=calls,
                    max_concurrent_calls_per_actor=calls,
                ),
                **_reserved(options.worker_resources or {}),
            )
        )
        for row in reports.iter_rows():
            report = json.loads(row["report"])
            if "error" in report:
                raise ChildProcessError(f"a worker failed: {report['error']}")
            yield report
    except ray.exceptions.RayError as error:
        raise ChildProcessError(f"Ray failed: {_reason(error)}") from error
    finally:
        ray.shutdown()


def _shards(plan: BatchInput, pending: list[int]) -> list[dict[str, str]]:
    """What is read in one go: parts of one row group, or one part of a JSONL file."""

    def place(number: int) -> tuple[str, int]:
        return plan.parts[number].source, plan.parts[number].start

    return [
        {"parts": json.dumps({number: asdict(plan.parts[number]) for number in numbers})}
        for _, numbers in itertools.groupby(pending, place)
    ]


def _reserved(resources: dict[str, float]) -> dict[str, Any]:
    """What a worker needs, as keywords of Ray; one CPU if nothing is said of CPUs."""
    named = {name: resources[key] for key, name in _RAY_NAMES.items() if key in resources}
    others = {key: amount for key, amount in resources.items() if key not in _RAY_NAMES}
    return {"num_cpus": 1} | named | ({"resources": others} if others else {})


def _reason(error: BaseException) -> str:
    """The last line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other runs from it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: --ray writes a folder of part files; name another")
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _import_ray() -> Any:
    # Else Ray, under `uv run`, makes a new environment for every worker.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ModuleNotFoundError(
            f"--ray needs Ray Data ({error}): pip install 'jaxattn[ray]'"
        ) from error
    return ray
