"""Times on a device, and what a plain copy and a plain matrix product reach there."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5  # a time is the median of so many
COPY_BYTES, MATRIX = 2**30, 8192
COPY_STEPS, MATRIX_STEPS = 20, 10


class Deadline:
    """A time by which something ends."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether it is past."""
        return time.monotonic() > self.end


def timed(run: Callable, state: Any, steps: int) -> tuple[float, Any]:
    """Seconds of one of `steps` steps, and the last state.

    `run(state)` takes all the steps and donates its state.
    """
    for _ in range(2):  # the first compiles
        state = jax.block_until_ready(run(state))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state))
        times.append(time.perf_counter() - start)
    return median(times) / steps, state


def chained(call: Callable, steps: int) -> Callable:
    """`run(state, *arguments)`: so many calls, of which each takes what the one before gave."""

    @partial(jax.jit, donate_argnums=0)
    def run(state: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, state: call(state, *arguments), state)

    return run


def copy_bandwidth() -> float:
    """Bytes per second read and written by adding one to 1 GiB."""
    run = chained(lambda data: data + 1, COPY_STEPS)
    taken, _ = timed(run, jnp.zeros(COPY_BYTES // 4, jnp.int32), COPY_STEPS)
    return 2 * COPY_BYTES / taken


def matrix_rate() -> float:
    """Operations per second of a large bfloat16 matrix product."""
    left = jax.random.normal(jax.random.key(0), (MATRIX, MATRIX), jnp.bfloat16)
    right = jax.random.normal(jax.random.key(1), (MATRIX, MATRIX), jnp.bfloat16) / MATRIX**0.5
    run = chained(jnp.matmul, MATRIX_STEPS)
    taken, _ = timed(lambda state: run(state, right), left, MATRIX_STEPS)
    return 2 * MATRIX**3 / taken
