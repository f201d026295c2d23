"""Gemma 3 270M on this machine's CPU: load, prefill, decode, memory, and a layer's decode time.

    uv run python benchmarks/cpu.py            # prints the tables
    uv run python benchmarks/cpu.py --write    # and keeps them in benchmarks/cpu.md

Every figure is a median over repeats. Memory bandwidth drifts on shared machines and bounds
decoding, so that it is probed beside each row.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import LLM, SamplingParams, kv_pages_shape, ragged_paged_attention

DECODE_TOKENS = 128
CONTEXT = 32  # tokens of the prompts that decoding starts from
LAYER_CONTEXTS = (1024, 4096, 16_384, 32_768)
WINDOW = 512


def bandwidth() -> float:
    """GB/s of reading 512 MB on all cores."""
    data = jnp.ones(2**27, jnp.float32)
    total = jax.jit(lambda x: jnp.max(x.reshape(64, -1), axis=1))
    jax.block_until_ready(total(data))
    return data.nbytes / _seconds(lambda: jax.block_until_ready(total(data)), 5) / 1e9


def _seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def _generate(llm: LLM, batch: int, prompt: int, new: int) -> None:
    """Continue `batch` prompts of random tokens."""
    ids = np.random.default_rng(0).integers(1000, 200_000, prompt).tolist()
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    llm.generate([{"prompt_token_ids": ids}] * batch, params)


def decode_rate(llm: LLM, batch: int, repeats: int) -> float:
    """Tokens/s of decoding from a context of `CONTEXT` tokens."""
    _generate(llm, batch, CONTEXT, 2)  # compiles
    first = _seconds(partial(_generate, llm, batch, CONTEXT, 1), repeats)
    whole = _seconds(partial(_generate, llm, batch, CONTEXT, DECODE_TOKENS), repeats)
    return (DECODE_TOKENS - 1) * batch / (whole - first)


def measure_model(dtype: str, repeats: int) -> dict[str, float]:
    """One row of the first table. Run in a process of its own, for the peak memory."""
    start = time.perf_counter()
    llm = LLM(
        "gemma-3-270m",
        dtype=dtype,
        max_model_len=2304,
        max_num_seqs=8,
        prefix_reuse=False,  # else the second prefill finds its prompt in the cache
        progress=False,
    )
    row = {"load s": time.perf_counter() - start}
    for prompt in (512, 2048):
        once = partial(_generate, llm, 1, prompt, 1)
        once()  # compiles
        row[f"prefill {prompt}"] = prompt / _seconds(once, repeats)
    for batch in (1, 8):
        row[f"decode {batch}"] = decode_rate(llm, batch, repeats)
    row["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def measure_layer(sliding_window: int | None, context: int, dtype: str, repeats: int) -> float:
    """Milliseconds of one attention layer's decode step (270M geometry, batch 1)."""
    layers, page_size = 8, 32
    pages_per_seq = -(-context // page_size)
    shape = kv_pages_shape(
        num_pages=pages_per_seq + 1, page_size=page_size, num_kv_heads=1, head_dim=256, dtype=dtype
    )
    pages = [jnp.ones(shape.shape, shape.dtype) for _ in range(layers)]
    queries = jnp.ones((1, 4, 256), dtype)
    new = jnp.ones((1, 1, 256), dtype)
    lengths = jnp.array([context], jnp.int32)
    table = jnp.arange(1, pages_per_seq + 1, dtype=jnp.int32)[None]
    cu_q_lens, distribution = jnp.array([0, 1], jnp.int32), jnp.array([1, 1, 1], jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def step(pages: list, queries: jax.Array) -> tuple[list, jax.Array]:
        for index in range(layers):
            queries, pages[index] = ragged_paged_attention(
                queries,
                new,
                new,
                pages[index],
                lengths,
                table,
                cu_q_lens,
                distribution,
                sm_scale=256**-0.5,
                sliding_window=sliding_window,
                backend="xla",
            )
        return pages, queries

    pages, out = step(pages, queries)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        pages, out = step(pages, queries)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - start)
    return median(times) / layers * 1e3


def model_table(repeats: int) -> list[str]:
    """Tokens/s for each dtype, each measured in a process of its own."""
    columns = ["prefill 512", "prefill 2048", "decode 1", "decode 8", "load s", "peak MB"]
    lines = [
        "| dtype | " + " | ".join(columns) + " | GB/s before |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    for dtype in ("float32", "bfloat16"):
        before = bandwidth()
        command = [sys.executable, __file__, "--dtype", dtype, "--repeats", str(repeats)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        numbers = [f"{row[name]:.{1 if row[name] < 100 else 0}f}" for name in columns]
        lines.append(f"| {dtype} | " + " | ".join(numbers) + f" | {before:.0f} |")
    return lines


def layer_table(repeats: int) -> list[str]:
    """Milliseconds of a layer's decode step by context."""
    lines = [
        "| layer, bfloat16 | " + " | ".join(f"{context:,}" for context in LAYER_CONTEXTS) + " |",
        "| --- |" + " --- |" * len(LAYER_CONTEXTS),
    ]
    for name, window in ((f"window {WINDOW}", WINDOW), ("global", None)):
        times = [measure_layer(window, size, "bfloat16", 5 * repeats) for size in LAYER_CONTEXTS]
        lines.append(f"| {name} | " + " | ".join(f"{each:.2f}" for each in times) + " |")
    return lines


def machine() -> str:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{cpu}, {len(jax.devices())} JAX device, {jax.__version__=}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the tables in cpu.md")
    parser.add_argument("--dtype", help="measure one row and print it as JSON")
    options = parser.parse_args()
    if options.dtype:
        print(json.dumps(measure_model(options.dtype, options.repeats)))
        return
    import os

    text = "\n".join(
        [
            "# Gemma 3 270M on CPU",
            "",
            f"Measured {date.today()} by `python benchmarks/cpu.py` on {machine()}, "
            f"{os.cpu_count()} cores; medians of {options.repeats}.",
            "",
            "Tokens/s of prefilling one prompt, and of decoding batches of 1 and 8 from a context "
            f"of {CONTEXT} to {CONTEXT + DECODE_TOKENS} tokens, through `LLM.generate`.",
            "",
            *model_table(options.repeats),
            "",
            "Milliseconds of one attention layer's decode step, batch 1, by context:",
            "",
            *layer_table(options.repeats),
            "",
        ]
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "cpu.md").write_text(text)


if __name__ == "__main__":
    main()
