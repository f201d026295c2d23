"""One sequence through a model by hand: plan, pages, batch, step. No engine, no scheduler."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxattn import PageTable, RaggedBatch, group_layers, init_cache
from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.sizing import table_width, worst_demand
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.sharding import HEADS


class SingleSequence:
    """Computes hidden states and logits of a sequence in steps of chosen sizes.

    Steps are padded to the sizes in `paddings`, so that several prompts share a compilation.
    `mesh`: one whose axis `heads` shares the heads; the model's weights lie on it.
    """

    def __init__(
        self,
        model: Gemma3,
        *,
        page_size: int,
        max_len: int,
        paddings: tuple[int, ...],
        hybrid: bool = True,
        backend: str = "xla",
        mesh: Mesh | None = None,
    ):
        dtype = model.dtype
        shards = mesh.shape[HEADS] if mesh else 1
        specs = layer_specs(model.config, page_size=page_size, kv_dtype=dtype, shards=shards)
        self.plan = group_layers(specs, hybrid=hybrid, max_len=max_len)
        limits = {"max_len": max_len, "step_tokens": max(paddings)}
        self.num_pages = [1 + n for n in worst_demand(self.plan, max_num_seqs=1, **limits)]
        self.widths = [table_width(self.plan, g, **limits) for g in range(len(self.plan.groups))]
        self.paddings = paddings
        graph, self.weights = nnx.split(model)

        def step(weights, ids, batch, cache):
            model = nnx.merge(graph, weights)
            axis = HEADS if mesh else None
            options = {"plan": self.plan, "batch": batch, "backend": backend, "heads_axis": axis}
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else nullcontext():
                return model(ids, cache, **options)

        self._step = jax.jit(step, donate_argnums=3)
        self._logits = jax.jit(lambda weights, rows: nnx.merge(graph, weights).logits(rows))
        self.restart()

    def restart(self) -> None:
        """Forget the sequence."""
        self.cache = init_cache(self.plan, self.num_pages)
        self.pages = PageAllocator(self.plan, self.num_pages)
        self.pages.admit(0)
        self.length = 0

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Hidden states `[len(ids), embed]` of the sequence's next tokens."""
        size = min(padding for padding in self.paddings if padding >= len(ids))
        settled, self.length = self.length, self.length + len(ids)
        assert self.pages.grow({0: self.length})
        tables = tuple(
            PageTable(*map(jnp.asarray, self.pages.page_table(group, [0], rows=1, width=width)))
            for group, width in enumerate(self.widths)
        )
        batch = RaggedBatch(
            kv_lens=jnp.array([self.length], jnp.int32),
            cu_q_lens=jnp.array([0, len(ids)], jnp.int32),
            distribution=jnp.array([int(len(ids) == 1), 1, 1], jnp.int32),
            tables=tables,
        )
        batch.check(tuple(self.num_pages))
        padded = jnp.asarray(np.pad(np.asarray(ids, np.int32), (0, size - len(ids))))
        hidden, self.cache = self._step(self.weights, padded, batch, self.cache)
        assert settled == self.length - len(ids)
        self.pages.settle(0, self.length)
        return np.asarray(hidden[: len(ids)])

    def prefill(self, ids: np.ndarray, chunk: int) -> np.ndarray:
        """Hidden states of a whole prompt, computed in chunks."""
        starts = range(0, len(ids), chunk)
        return np.concatenate([self.step(ids[start : start + chunk]) for start in starts])

    def greedy(self, last_hidden: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
        """The next `count` tokens, and the logits `[count, vocab]` that chose them."""
        tokens, logits = [], []
        for _ in range(count):
            logits.append(self.logits(last_hidden[None])[0])
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) < count:
                last_hidden = self.step(np.array(tokens[-1:]))[0]
        return tokens, np.stack(logits)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits `[rows, vocab]` of hidden states, computed 32 rows at a time."""
        rows = np.pad(hidden, ((0, -len(hidden) % 32), (0, 0))).reshape(-1, 32, hidden.shape[1])
        logits = [np.asarray(self._logits(self.weights, each)) for each in rows]
        return np.concatenate(logits)[: len(hidden)]
