"""The compiled step: tokens in, logits out, cache donated. One compilation for each bucket."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.pages import PageAllocator, table_width, worst_demand
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState, init_cache
from jaxattn.engine.sampler import (
    RowParams,
    TokenHistory,
    TopLogprobs,
    choose,
    top_logprobs,
)
from jaxattn.engine.scheduler import Scheduled
from jaxattn.models.gemma3.model import Gemma3

_SCORE_ROWS = 32  # prompt tokens whose whole logits exist at one time


class Runner:
    """Owns the model's weights and the cache on the device, and runs steps on them."""

    def __init__(
        self,
        model: Gemma3,
        plan: CachePlan,
        *,
        max_num_seqs: int,
        buckets: tuple[int, ...],
        backend: str | None,
    ):
        self.plan = plan
        self.buckets = buckets
        self.max_num_seqs = max_num_seqs
        self.vocab_size = model.config.vocab_size
        limits = {"max_len": plan.max_len, "step_tokens": buckets[-1]}
        demand = worst_demand(plan, max_num_seqs=max_num_seqs, **limits)
        self.num_pages = tuple(pages + 1 for pages in demand)
        self._widths = tuple(
            table_width(plan, group, **limits) for group in range(len(plan.groups))
        )
        graph, state = nnx.split(model)
        # Flat: flattening the nested state in Python would cost each step a millisecond.
        self._weights, tree = jax.tree.flatten(state)
        rebuild = partial(_rebuild, graph, tree)
        self._step = jax.jit(
            partial(_step, rebuild, plan, backend),
            donate_argnames="cache",
            compiler_options=_compiler_options(),
        )
        self._score = jax.jit(partial(_score, rebuild))
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache (after a step that failed, its donated cache is gone)."""
        self.cache = init_cache(self.plan, self.num_pages)
        self.allocator = PageAllocator(self.plan, self.num_pages)

    def num_compiled(self) -> int:
        """How many step shapes have been compiled so far: at most one for each bucket."""
        return self._step._cache_size()  # type: ignore[attr-defined]

    def run(
        self, step: list[Scheduled]
    ) -> tuple[np.ndarray, TopLogprobs | None, TopLogprobs | None]:
        """Compute a step.

        Returns the chosen token of every scheduled sequence (meaningless where it does not
        sample), their log-probabilities if one asks, and those of each flat row's next prompt
        token if one asks.
        """
        num_tokens = sum(each.num_tokens for each in step)
        size = min(bucket for bucket in self.buckets if bucket >= num_tokens)
        rows = min(size, self.max_num_seqs)
        token_ids, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
        kv_lens, cu_q_lens = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        start = 0
        for row, (sequence, count) in enumerate(step):
            settled = sequence.num_settled
            token_ids[start : start + count] = sequence.tokens[settled : settled + count]
            following = sequence.tokens[settled + 1 : settled + count + 1]
            targets[start : start + len(following)] = following
            start += count
            kv_lens[row], cu_q_lens[row + 1] = settled + count, start
        cu_q_lens[len(step) + 1 :] = start
        decode = sum(each.num_tokens == 1 for each in step)
        ids = [each.sequence.id for each in step]
        tables = [
            self.allocator.page_table(group, ids, rows=rows, width=width)
            for group, width in enumerate(self._widths)
        ]
        distribution = np.array([decode, len(step), len(step)], np.int32)
        # One transfer for all of them: each on its own costs a tenth of a millisecond.
        kv_lens, cu_q_lens, distribution, tables = jax.device_put(
            (kv_lens, cu_q_lens, distribution, tables)
        )
        batch = RaggedBatch(
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            distribution=distribution,
            tables=tuple(PageTable(*table) for table in tables),
        )
        any_samples = np.array(any(each.samples for each in step))
        logits, hidden, self.cache = self._step(
            self._weights, token_ids, any_samples, batch, cache=self.cache
        )
        chosen = choose(logits, *self._choice(step, rows))
        params = [each.sequence.params for each in step]
        logprobs = prompt_logprobs = None
        if any(each.logprobs is not None for each in params):
            logprobs = top_logprobs(logits, chosen)
        if any(each.prompt_logprobs is not None for each in params):
            prompt_logprobs = self._score(self._weights, hidden, targets)
        return jax.device_get((chosen, logprobs, prompt_logprobs))

    def _choice(
        self, step: list[Scheduled], rows: int
    ) -> tuple[RowParams | None, TokenHistory | None]:
        """The sampling parameters of a step, and the history if a penalty needs it."""
        sequences = [each.sequence for each in step]
        params = RowParams.of(
            [(each.params, each.seed, each.index, len(each.new_tokens)) for each in sequences], rows
        )
        if not any(each.params.has_penalties for each in sequences):
            return params, None
        in_prompt = np.zeros((rows, self.vocab_size), bool)
        counts = np.zeros((rows, self.vocab_size), np.int32)
        for row, sequence in enumerate(sequences):
            in_prompt[row], counts[row] = sequence.history(self.vocab_size)
        return params, TokenHistory(jnp.asarray(in_prompt), jnp.asarray(counts))


def _compiler_options() -> dict[str, int]:
    """512-bit vectors on CPU: with XLA's 256 the head of a single row takes 1.6 times as long."""
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else {}


def _rebuild(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, weights: list[Array]) -> Gemma3:
    """The model from its flat weights."""
    return nnx.merge(graph, jax.tree.unflatten(tree, weights))


def _step(
    rebuild: Callable[[list[Array]], Gemma3],
    plan: CachePlan,
    backend: str | None,
    weights: list[Array],
    token_ids: Int32[Array, "tokens"],
    any_samples: Array,
    batch: RaggedBatch,
    *,
    cache: CacheState,
) -> tuple[Float[Array, "seqs vocab"], Float[Array, "tokens embed"], CacheState]:
    """Logits at each sequence's last new token (zeros if nobody samples), and the new cache."""
    model = rebuild(weights)
    hidden, cache = model(token_ids, cache, plan=plan, batch=batch, backend=backend)
    last = hidden[batch.last_rows()]
    shape = (last.shape[0], model.config.vocab_size)
    logits = jax.lax.cond(
        any_samples, model.logits, lambda rows: jnp.zeros(shape, jnp.float32), last
    )
    return logits, hidden, cache


def _score(
    rebuild: Callable[[list[Array]], Gemma3],
    weights: list[Array],
    hidden: Float[Array, "tokens embed"],
    targets: Int32[Array, "tokens"],
) -> TopLogprobs:
    """Log-probability of each row's target token, a few rows' logits at a time."""
    model = rebuild(weights)
    blocks = jax.tree.map(
        lambda rows: jnp.pad(
            rows, [(0, -len(rows) % _SCORE_ROWS)] + [(0, 0)] * (rows.ndim - 1)
        ).reshape(-1, _SCORE_ROWS, *rows.shape[1:]),
        (hidden, targets),
    )
    scores = jax.lax.map(lambda block: top_logprobs(model.logits(block[0]), block[1]), blocks)
    return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:])[: len(targets)], scores)
