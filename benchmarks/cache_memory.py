"""Cache that Gemma 3 takes, beside the least that is possible, and how many requests fit.

    uv run python -m benchmarks.cache_memory            # prints the tables
    uv run python -m benchmarks.cache_memory --write    # and keeps them in cache_memory.md

Plans, and traces of the engine's scheduler and page allocator without a model: nothing is timed,
the numbers are the same on every machine.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks import host_trace, vllm_rule
from jaxattn.cache.plan import CachePlan, group_layers
from jaxattn.cache.sizing import capacity, cdiv, pool_pages, worst_demand
from jaxattn.engine.scheduler import STEPS_IN_FLIGHT
from jaxattn.models.gemma3.config import CONFIGS, Gemma3Config
from jaxattn.models.gemma3.model import layer_specs

PAGE_SIZE, STEP_TOKENS = 32, 512  # the engine's defaults
IN_FLIGHT = STEPS_IN_FLIGHT * STEP_TOKENS
LENGTHS = {"8k": 8192, "16k": 16_384, "32k": 32_768, "128k": 131_072}
TOGETHER = 8  # sequences of the second trace
LARGEST = CONFIGS["gemma-3-27b"]
MEMORY = 40 * 10**9  # bytes of its cache in which requests are counted
NEW_TOKENS = 1024  # the last of a request's tokens in those traces: all are there at a time


@dataclass(frozen=True)
class Sized:
    """A Gemma 3 with a cache in bfloat16 for sequences of at most `length` tokens."""

    config: Gemma3Config
    length: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.config.num_kv_heads * self.config.head_dim * 2

    @cached_property
    def plan(self) -> CachePlan:
        """The engine's plan."""
        specs = layer_specs(self.config, page_size=PAGE_SIZE, kv_dtype="bfloat16")
        return group_layers(specs, max_len=self.length)

    def num_bytes(self, pages: Sequence[int]) -> int:
        """Bytes of so many pages in each group."""
        return sum(count * self.plan.page_bytes(group) for group, count in enumerate(pages))

    def ideal(self, chunk: int) -> int:
        """Bytes of `length` tokens in global layers, of W - 1 + chunk where the window is W."""
        windows = [layer.sliding_window for layer in self.config.layers]
        seen = [
            min(self.length, window - 1 + chunk) if window else self.length for window in windows
        ]
        return self.token_bytes * sum(seen)

    def most_pages(self, count: int) -> tuple[int, ...]:
        """Pages with which `count` sequences never run dry."""
        return worst_demand(
            self.plan, max_num_seqs=count, max_len=self.length, step_tokens=IN_FLIGHT
        )

    def traced(self, count: int) -> int:
        """The most bytes that `count` sequences hold at a time."""
        new = cdiv(count * self.length, STEP_TOKENS) + 64  # the first is there when the last comes
        pools = [1 + pages for pages in self.most_pages(count)]
        steps = self.trace(pools, [(self.length - new, new)] * count)
        return max(self.num_bytes(step.pages) for step in steps)

    def trace(
        self,
        num_pages: Sequence[int],
        requests: Sequence[tuple[int, int]],
        step_tokens: int = STEP_TOKENS,
    ) -> Iterator[host_trace.TracedStep]:
        """Requests of (prompt tokens, new tokens), all there from the start."""
        return host_trace.trace(
            self.plan, num_pages, requests, max_num_seqs=256, max_num_batched_tokens=step_tokens
        )


@dataclass(frozen=True)
class Admission:
    """Requests of `length` tokens in `MEMORY` bytes of the largest model's cache."""

    length: int

    @cached_property
    def sized(self) -> Sized:
        return Sized(LARGEST, self.length)

    @cached_property
    def vllm(self) -> vllm_rule.Groups:
        """vLLM's groups of the same layers."""
        return vllm_rule.Groups.of(LARGEST, token_bytes=self.sized.token_bytes)

    @property
    def requests(self) -> list[tuple[int, int]]:
        """More than fit."""
        return [(self.length - NEW_TOKENS, NEW_TOKENS)] * (2 * self.capacity(STEP_TOKENS) + 2)

    def pools(self, step_tokens: int) -> tuple[int, ...]:
        """The pages that the engine makes of the bytes."""
        return pool_pages(
            self.sized.plan,
            MEMORY,
            max_len=self.length,
            typical_len=self.length,
            step_tokens=step_tokens,
        )

    def capacity(self, step_tokens: int) -> int:
        """How many always fit at a time."""
        pools = self.pools(step_tokens)
        return capacity(self.sized.plan, pools, length=self.length, step_tokens=step_tokens)

    def traced(self, step_tokens: int) -> tuple[int, int]:
        """The most that the scheduler runs at a time, and how many are preempted."""
        steps = list(self.sized.trace(self.pools(step_tokens), self.requests, step_tokens))
        return max(step.running for step in steps), steps[-1].preemptions

    def vllm_reported(self, in_flight: int) -> float:
        """How many vLLM says that it serves at a time."""
        return self.vllm.concurrency(MEMORY, self.length, in_flight)

    def vllm_traced(self, step_tokens: int, steps_in_flight: int) -> tuple[int, int]:
        """The most that run at a time by vLLM's gate, and how many are preempted."""
        gate = vllm_rule.Gate(
            self.vllm,
            MEMORY,
            self.requests,
            max_num_batched_tokens=step_tokens,
            steps_in_flight=steps_in_flight,
        )
        steps = list(gate.run())
        return max(step.running for step in steps), steps[-1].preemptions


def memory_table() -> list[str]:
    """MiB, and their ratios to the ideal, of every size and length."""
    lines = [
        "| model | tokens | ideal | plan | trace | plan / ideal | trace / ideal | "
        f"trace / ideal, chunk {STEP_TOKENS} | {TOGETHER} together, each | "
        f"/ ideal, chunk {STEP_TOKENS} |",
        "| --- |" + " --- |" * 9,
    ]
    for name, config in CONFIGS.items():
        for label in ("8k", "32k", "128k"):
            if LENGTHS[label] > config.max_position:
                lines.append(f"| {name} | {label} | the model's limit is 32k |" + " |" * 7)
                continue
            sized = Sized(config, LENGTHS[label])
            ideal, short = sized.ideal(IN_FLIGHT), sized.ideal(STEP_TOKENS)
            plan = sized.num_bytes(sized.most_pages(1))
            one, each = sized.traced(1), sized.traced(TOGETHER) / TOGETHER
            cells = [name, label, *(f"{size / 2**20:,.1f}" for size in (ideal, plan, one))]
            cells += [f"{plan / ideal:.3f}", f"{one / ideal:.3f}", f"{one / short:.3f}"]
            cells += [f"{each / 2**20:,.1f}", f"{each / short:.3f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def admission_table() -> list[str]:
    """Requests at a time by length: by vLLM's two rules, and ours."""
    stock = vllm_rule.STOCK_TOKENS
    rows: dict[str, list[str]] = {}
    for length in LENGTHS.values():
        case = Admission(length)
        ours, peer = case.capacity(stock), case.vllm_reported(2 * stock)
        cells = {
            f"vLLM reports, {stock:,} tokens a step": f"{case.vllm_reported(stock):.1f}",
            f"vLLM reports, {stock:,}, asynchronous": f"{peer:.1f}",
            f"vLLM reports, {STEP_TOKENS}, asynchronous": f"{case.vllm_reported(IN_FLIGHT):.1f}",
            f"jaxattn's capacity, {STEP_TOKENS}": f"{case.capacity(STEP_TOKENS)}",
            f"jaxattn's capacity, {stock:,}": f"{ours}",
            f"**the last / vLLM reports, {stock:,}, asynchronous**": f"**{ours / peer:.1f}x**",
            f"jaxattn in a trace, {STEP_TOKENS}": _run(*case.traced(STEP_TOKENS)),
            f"jaxattn in a trace, {stock:,}": _run(*case.traced(stock)),
            f"vLLM's gate in a trace, {stock:,}": _run(*case.vllm_traced(stock, 1)),
            f"vLLM's gate in a trace, {stock:,}, asynchronous": _run(*case.vllm_traced(stock, 2)),
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    lines = [f"| {' | '.join(('requests of', *LENGTHS))} |", "| --- |" + " --- |" * len(LENGTHS)]
    return lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]


def _run(most: int, preemptions: int) -> str:
    return f"{most}, {preemptions} preempted" if preemptions else f"{most}"


def division_table() -> list[str]:
    """Requests that fit when the pools were divided for another length."""
    plan = Sized(LARGEST, LENGTHS["128k"]).plan
    lines = [
        f"| {' | '.join(('divided for', *LENGTHS))} |",
        "| --- |" + " --- |" * len(LENGTHS),
    ]
    for label, typical in LENGTHS.items():
        pools = pool_pages(
            plan, MEMORY, max_len=plan.max_len, typical_len=typical, step_tokens=STEP_TOKENS
        )
        fits = [
            str(capacity(plan, pools, length=length, step_tokens=STEP_TOKENS))
            for length in LENGTHS.values()
        ]
        lines.append(f"| {label} | " + " | ".join(fits) + " |")
    return lines


TEXT = """\
# Memory of the cache

Computed by `python -m benchmarks.cache_memory`: plans, and traces of the engine's scheduler and
page allocator without a model. Nothing is timed, any machine gives the same. Pages of {page_size}
tokens, steps of {step} tokens, bfloat16.

## Pages of a sequence

MiB. **ideal**: in global layers the length, in layers of window W W - 1 + chunk tokens. The chunk
is what is in flight, {in_flight:,} tokens: a step is scheduled while the one before it runs.
**plan**: pages with which one sequence never runs dry. **trace**: the most that one sequence
held, prompt in chunks, then decoding. **{together} together**: the most that so many held at a
time, each; they share the tokens in flight.

{memory}

With one step's {step} tokens as the chunk, a single prompt at 8k is above 1.05: alone in the engine
it has both steps in flight. Where others run too, it is below 1.

## Requests at a time

In {memory_size} GB of Gemma 3 27B's cache: requests that end after so many tokens, {new:,} of
them generated, all waiting at the start.

- **vLLM reports**: the concurrency that vLLM {version} prints for that `max_model_len`: blocks of
  {block} tokens over the charge of a request, W - 1 + the tokens in flight in every windowed group
  (6 groups of 10 layers for 52 layers). {stock:,} tokens a step are its server's default on an
  H100; asynchronous is two steps in flight, as here.
- **jaxattn's capacity**: requests that always fit. The tokens of a step are charged once for the
  whole batch.
- **in a trace**: the most that run at a time. Both take a request in by the tokens that it has so
  far. By vLLM's gate it must find its charge free, while those that run hold what they hold.

*vLLM's numbers are computed here from its rules (`vllm_rule.py`); it was not run.*

{admission}

The report is what vLLM promises, and what the factor is of. In a trace its gate comes close to
ours: a newcomer is charged in full, but the others are past their prompts by then and hold a window
and little more. What is left of the difference there is the charge of the last one, and padding, 60
layers for 52.

## Pools are divided at the start

Every group has a pool of its own, divided for requests of `expected_len` tokens, a quarter of
`max_model_len` if nothing is said (vLLM's groups draw from one pool). {memory_size} GB,
`max_model_len` 128k, steps of {step}: how many requests of each length always fit.

{division}
"""


def report() -> str:
    """The whole page."""
    return TEXT.format(
        page_size=PAGE_SIZE,
        step=STEP_TOKENS,
        steps=STEPS_IN_FLIGHT,
        in_flight=IN_FLIGHT,
        together=TOGETHER,
        memory="\n".join(memory_table()),
        memory_size=MEMORY // 10**9,
        new=NEW_TOKENS,
        version=vllm_rule.VERSION,
        block=vllm_rule.BLOCK,
        stock=vllm_rule.STOCK_TOKENS,
        admission="\n".join(admission_table()),
        division="\n".join(division_table()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the page in cache_memory.md")
    options = parser.parse_args()
    text = report()
    print(text)
    if options.write:
        (Path(__file__).parent / "cache_memory.md").write_text(text)


if __name__ == "__main__":
    main()
