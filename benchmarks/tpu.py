"""The attention kernels on a TPU: every layer against the reference, then its times.

    uv run python -m benchmarks.tpu               # on a TPU: numerics, then timings
    uv run python -m benchmarks.tpu --write       # and keeps them in benchmarks/tpu.md
    uv run python -m benchmarks.tpu --interpret   # anywhere: numerics alone, interpreted

Times stand beside the bandwidth that a plain copy reaches on the same chip, measured first.
"""

import argparse
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import REPEATS, chained, copy_bandwidth, timed
from benchmarks.tpu_shapes import DTYPE, LAYERS, Layer
from jaxattn import Target, kv_pages_shape, ragged_paged_attention
from jaxattn.kernels.pallas.tiles import chip_of

INTERPRETED = "v6e"  # the chip whose tiles are chosen in the interpreter
PAGE_SIZE = 16
SEQS, CONTEXT, CHUNK = 64, 4096, 4096  # of the timings
STEPS = 20  # a time is a median of REPEATS runs of STEPS steps
TOLERANCE = 4e-2  # one step of bfloat16 for outputs from 4 to 8 is 0.031


def noise(shape: tuple[int, ...]) -> jax.Array:
    """Pages full of noise, those that no sequence owns too."""
    return jax.random.normal(jax.random.key(1), shape, DTYPE).at[0].set(0)


def ones(shape: tuple[int, ...]) -> jax.Array:
    """Pages made without a second array of their size, which a chip may not have room for."""
    return jnp.ones(shape, DTYPE)


def batch(
    layer: Layer, lengths: list[tuple[int, int]], decode: int, pages: Callable
) -> tuple[Any, ...]:
    """Arguments of a call for sequences of `(q_len, kv_len)`, the first `decode` of them decoding.

    `pages(shape)` makes the pool; the sequences' pages are in no order.
    """
    rng = np.random.default_rng(0)
    q_lens, kv_lens = np.array(lengths, np.int32).T
    pages_of = -(-kv_lens // PAGE_SIZE)
    ids = rng.permutation(np.arange(1, pages_of.sum() + 1, dtype=np.int32))
    table = np.zeros((len(lengths), pages_of.max()), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(pages_of), pages_of, strict=True)):
        table[row, :count] = ids[end - count : end]
    shape: Any = kv_pages_shape(
        num_pages=len(ids) + 1,
        page_size=PAGE_SIZE,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype=DTYPE,
    )
    keys = jax.random.split(jax.random.key(0), 3)

    def draw(key: jax.Array, heads: int) -> jax.Array:
        return jax.random.normal(key, (int(q_lens.sum()), heads, layer.head_dim), DTYPE)

    return (
        draw(keys[0], layer.num_q_heads),
        draw(keys[1], layer.num_kv_heads),
        draw(keys[2], layer.num_kv_heads),
        pages(shape.shape),
        jnp.asarray(kv_lens),
        jnp.asarray(table),
        jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        jnp.array([decode, decode, len(lengths)], jnp.int32),
    )


def attention(layer: Layer, window: int | None, backend: str, **options: Any) -> Callable:
    """The call for one layer, not jitted."""
    return partial(
        ragged_paged_attention,
        sm_scale=layer.head_dim**-0.5,
        sliding_window=window,
        backend=backend,
        **options,
    )


def error(layer: Layer, window: int | None, options: dict[str, Any]) -> float:
    """Largest difference to the reference, of a mixed batch; raises if a page differs at all."""
    edge = layer.sliding_window
    decoding = [(1, 1), (1, edge), (1, edge + 1), (1, 2 * edge + 37)]
    prefill = [(150, 150), (40, edge + 90)]
    arguments = batch(layer, decoding + prefill, len(decoding), noise)
    out, pages = jax.jit(attention(layer, window, "pallas_tpu", **options))(*arguments)
    expected, expected_pages = jax.jit(attention(layer, window, "reference"))(*arguments)
    got, wanted = (np.asarray(each).view(np.uint16) for each in (pages, expected_pages))
    if not np.array_equal(got, wanted):
        raise AssertionError(f"{layer.name}, window {window}: the pages differ")
    return float(jnp.max(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32))))


def numerics(options: dict[str, Any]) -> tuple[list[str], bool]:
    """The table of errors, and whether all are small."""
    lines = ["| layer | window | largest error |", "| --- | --- | --- |"]
    good = True
    for layer in LAYERS:
        for window in (layer.sliding_window, None):
            worst = error(layer, window, options)
            good &= worst <= TOLERANCE  # false for NaN
            lines.append(f"| {layer.name} | {window or 'global'} | {worst:.1e} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines, good


def step_seconds(layer: Layer, window: int | None, lengths: list[tuple[int, int]]) -> float:
    """Seconds of one call; each call's output is the next one's queries."""
    decode = len(lengths) if all(q_len == 1 for q_len, _ in lengths) else 0
    queries, keys, values, pages, *rest = batch(layer, lengths, decode, ones)
    call = attention(layer, window, "pallas_tpu")

    run = chained(lambda state: call(state[0], keys, values, state[1], *rest), STEPS)
    return timed(run, (queries, pages), STEPS)[0]


def timings(copy: float) -> list[str]:
    """Decode and prefill of every layer beside the copy's bandwidth and the chip's peak."""
    chip = chip_of(jax.devices()[0].device_kind)
    assert chip is not None, "the kernels ran"
    peak = chip.bf16_tflops
    lines = [
        "| layer | window | work | us | visible KV, GB/s | of copy | TFLOP/s | of peak |",
        "| --- |" + " --- |" * 7,
    ]
    works = (
        (f"decode {SEQS} x {CONTEXT:,}", [(1, CONTEXT)] * SEQS),
        (f"prefill {CHUNK:,}", [(CHUNK, CHUNK)]),
    )
    for layer in LAYERS:
        for window in (layer.sliding_window, None):
            for work, lengths in works:
                taken = step_seconds(layer, window, lengths)
                visible, pairs = _work(lengths, window)
                rate = visible * layer.token_bytes / taken
                flops = layer.flops(1, pairs) / taken / 1e12
                lines.append(
                    f"| {layer.name} | {window or 'global'} | {work} | {taken * 1e6:.1f} "
                    f"| {rate / 1e9:.0f} | {rate / copy:.0%} | {flops:.1f} | {flops / peak:.0%} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _work(lengths: list[tuple[int, int]], window: int | None) -> tuple[int, int]:
    """KV tokens that the queries of a sequence see together, and pairs of a query and a key."""
    tokens = pairs = 0
    for q_len, kv_len in lengths:
        most = kv_len if window is None else window
        tokens += min(kv_len, most + q_len - 1)
        pairs += sum(min(position + 1, most) for position in range(kv_len - q_len, kv_len))
    return tokens, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="numerics alone, without a TPU")
    parser.add_argument("--write", action="store_true", help="keep the tables in tpu.md")
    options = parser.parse_args()
    if options.interpret and options.write:
        sys.exit("--write keeps times, and --interpret has none")
    if options.interpret:
        jax.config.update("jax_platforms", "cpu")
        lines, good = numerics({"interpret": True, "target": Target.tpu(INTERPRETED)})
        print("\n".join(lines))
        sys.exit(0 if good else f"an error is above {TOLERANCE}")
    device = jax.devices()[0]
    if device.platform != "tpu":
        sys.exit(
            f"no TPU: JAX's default device is {device.device_kind} ({device.platform}). Run this "
            "on a TPU with `pip install 'jax[tpu]'`, or only its numerics with --interpret"
        )
    lines, good = numerics({})
    if not good:
        print("\n".join(lines))
        sys.exit(f"an error is above {TOLERANCE}: no timings of a wrong kernel")
    copy = copy_bandwidth()
    text = "\n".join(
        [
            "# Attention on TPU",
            "",
            f"Measured {date.today()} by `python -m benchmarks.tpu` on one {device.device_kind}, "
            f"jax {jax.__version__}; medians of {REPEATS}, {DTYPE}, pages of {PAGE_SIZE} tokens.",
            f"A plain copy reads and writes {copy / 1e9:.0f} GB/s.",
            "",
            *timings(copy),
            "",
            "Against the float32 reference:",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "tpu.md").write_text(text)


if __name__ == "__main__":
    main()
