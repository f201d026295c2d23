"""What the host does for a decode step, without a model: on a TPU a step takes milliseconds."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from benchmarks.host_trace import NoText
from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.sizing import worst_demand
from jaxattn.cache.state import CacheState
from jaxattn.engine.engine import Engine
from jaxattn.engine.scheduler import STEPS_IN_FLIGHT
from jaxattn.models.gemma3.config import Gemma3Config, layer_pattern
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import random_weights
from jaxattn.sampling import SamplingParams

CONTEXTS = (8192, 30_000)  # tokens of the sequences, log-uniform
MAX_MODEL_LEN = 32_768
STEP_TOKENS = 4096
VOCAB = 300


class NoLayers(Gemma3):
    """A model whose blocks do nothing, and that touches no page."""

    def __call__(
        self, token_ids: Int32[Array, "tokens"], cache: CacheState, **rest: Any
    ) -> tuple[Float[Array, "tokens embed"], CacheState]:
        return self.embed[...][token_ids], cache


def host_cost(num_seqs: int, steps: int = 100) -> dict[str, float]:
    """Milliseconds of the engine's thread in a decode step, in all and of its parts.

    Processor time, so that other processes count little. Two cache groups, a window of 1024.
    """
    config = Gemma3Config(
        embed_dim=16,
        mlp_dim=16,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
        query_scale=0.25,
        max_position=MAX_MODEL_LEN,
        layers=layer_pattern(2, sliding_window=1024, global_every=2),
        vocab_size=VOCAB,
    )
    engine = Engine(
        NoLayers(config, random_weights(config, jax.random.key(0))),
        eos_ids=(),
        kv_dtype="bfloat16",
        page_size=32,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        memory=2**27,
        backend="xla",
    )
    # As many pages as the sequences need: nobody touches them, so that they need not exist.
    pages = worst_demand(
        engine.plan,
        max_num_seqs=num_seqs,
        max_len=MAX_MODEL_LEN,
        step_tokens=STEPS_IN_FLIGHT * STEP_TOKENS,
    )
    (scheduler,) = engine.schedulers
    scheduler.allocator = PageAllocator(
        engine.plan, [1 + count for count in pages], prefix_reuse=True
    )
    rng = np.random.default_rng(0)
    low, high = np.log(CONTEXTS)
    lengths = np.exp(rng.uniform(low, high, num_seqs)).astype(int)
    params = SamplingParams(temperature=0, max_tokens=2**14, ignore_eos=True)
    sequences = [
        engine.add(rng.integers(0, VOCAB, length).tolist(), params, seed=0, stream=NoText())
        for length in lengths
    ]

    def step() -> None:
        for each in engine.step():
            if each.finish_reason is not None:
                raise RuntimeError(f"a sequence ended: {each.finish_reason}, {each.error!r}")

    while any(each.num_settled < each.num_prompt for each in sequences):
        step()
    for _ in range(10):  # compiles the step that only decodes
        step()
    parts: dict[str, float] = {}
    for owner, name in (
        (scheduler, "schedule"),
        (scheduler, "settle"),
        (scheduler.allocator, "page_table"),
        (engine.runner, "dispatch"),
    ):
        setattr(owner, name, _counted(getattr(owner, name), parts, name))
    parts.clear()
    start, wall = time.thread_time(), time.perf_counter()
    for _ in range(steps):
        step()
    parts["step"] = time.thread_time() - start
    parts["wall"] = time.perf_counter() - wall
    return {name: seconds / steps * 1e3 for name, seconds in parts.items()}


def _counted(run: Callable, parts: dict[str, float], name: str) -> Callable:
    """`run`, its processor time added up in `parts[name]`."""

    def counted(*args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return run(*args, **options)
        finally:
            parts[name] = parts.get(name, 0.0) + time.thread_time() - start

    return counted
