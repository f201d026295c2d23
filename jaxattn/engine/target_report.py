"""What `jaxattn plan --target` prints."""

from collections.abc import Iterable, Sequence
from importlib.metadata import version

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from jaxattn.engine.ahead import Compiled
from jaxattn.engine.target_plan import BACKEND, TargetPlan


def report(plan: TargetPlan, steps: Sequence[Compiled]) -> RenderableType:
    """The bytes of each device, and what fits and how fast it could be at most."""
    wanted, where = plan.wanted, plan.slice
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu"))
    return Group(
        f"{wanted.model} on {where.name}: tensor parallel {plan.tensor_parallel}, data parallel "
        f"{plan.data_parallel}; weights {wanted.quantization or wanted.dtype}, cache "
        f"{wanted.kv_dtype}, {BACKEND}",
        "",
        _bytes(plan, steps),
        "",
        _speed(plan),
        "",
        f"Compiled ahead of time ({versions}) in {sum(step.seconds for step in steps):.0f} s; "
        "nothing was run. The last two columns are a bound, no measurement: the text model's "
        f"weights, and keys and values that are seen, read once at {where.hbm_gb_per_s:,} GB/s; "
        "computing and exchanges take no time in it.",
    )


def _bytes(plan: TargetPlan, steps: Sequence[Compiled]) -> Table:
    table = _table("MiB of a device", *(step.case for step in steps), "")

    def row(name: str, sizes: Iterable[float], note: str = "") -> None:
        table.add_row(name, *(f"{size / 2**20:,.1f}" for size in sizes), note)

    def always(name: str, size: float, note: str = "") -> None:
        row(name, [size] * len(steps), note)

    always("weights, text", plan.weight_bytes - plan.tower_bytes)
    if plan.tower_bytes:
        always("weights, vision", plan.tower_bytes, "whole on every device")
    for index, group in enumerate(plan.cache.groups):
        kept = group.store.retention
        kind = "global" if kept is None else f"windowed ({kept})"
        note = f"{len(group.layers)} {kind} layers, {plan.num_pages[index]:,} pages"
        always(f"cache, group {index}", plan.pool_bytes(index), note)
    row("other arguments", map(plan.other_bytes, steps), "tokens, page tables; padding")
    temporary = [each.temp_bytes + each.output_bytes - each.alias_bytes for each in steps]
    row("temporaries", temporary, "what the step computes with, and its outputs")
    row("code", [each.code_bytes for each in steps])
    sums = list(map(plan.device_bytes, steps))
    row("in all", sums)
    always("memory", plan.slice.hbm_bytes, "that a program may use")
    row("left", [plan.slice.hbm_bytes - each for each in sums])
    return table


def _speed(plan: TargetPlan) -> Table:
    table = _table("tokens of each", "sequences at a time", "least ms a step", "most tokens/s")
    longest = plan.wanted.max_len
    for length in sorted({max(2, longest // part) for part in (16, 4, 1)}):
        table.add_row(
            f"{length:,}",
            f"{plan.data_parallel * plan.sequences(length):,}",
            f"{1e3 * plan.decode_seconds(length):.2f}",
            f"{plan.most_tokens_per_s(length):,.0f}",
        )
    return table


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if 0 < index and header else "left")
    return table
