"""Runs the compiled step: host arrays in, buffers donated, results fetched when they are ready."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import CachePlan
from jaxattn.engine.image_encoder import ImageEncoder, images_of
from jaxattn.engine.images import public_ids
from jaxattn.engine.program import Program
from jaxattn.engine.sampler import Asked, ParamTable, TopLogprobs
from jaxattn.engine.scheduler import Scheduled
from jaxattn.engine.sequence import Sequence as Continuation
from jaxattn.engine.step import Buffers, StepInputs
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.registry import Backend
from jaxattn.sharding import DATA


@dataclass(frozen=True)
class Results:
    """What a step computed, on the host: `[replica, row]` or `[replica, flat token]`."""

    chosen: Int32[np.ndarray, "replicas rows"]
    logprobs: TopLogprobs | None
    prompt_logprobs: TopLogprobs | None


@dataclass(frozen=True)
class Dispatched:
    """A step that runs: its shares on each replica, and what to fetch of it."""

    shares: list[list[Scheduled]]
    wanted: tuple[Any, Any, Any]

    def fetch(self) -> Results:
        """Wait for the step. Raises what went wrong on the device."""
        fetched = jax.device_get(self.wanted)
        replicas = len(self.shares)
        return Results(
            *jax.tree.map(lambda rows: rows.reshape(replicas, -1, *rows.shape[1:]), fetched)
        )


class Runner:
    """Owns the model's weights and the buffers on the device, and runs steps on them.

    `mesh`: None, or one with the axes `data` (every replica has a cache of its own and runs its
    own sequences) and `heads` (devices that share the heads of one replica).
    """

    def __init__(
        self,
        model: Gemma3,
        plan: CachePlan,
        *,
        num_pages: Sequence[int],
        widths: Sequence[int],
        max_num_seqs: int,
        buckets: tuple[int, ...],
        backend: str | Backend | None,
        mesh: Mesh | None = None,
    ):
        self.vocab_size = model.config.vocab_size
        self.buckets = buckets
        self.program = Program(
            model,
            plan,
            num_pages=num_pages,
            widths=widths,
            max_num_seqs=max_num_seqs,
            backend=backend,
            mesh=mesh,
        )
        self.num_replicas = self.program.num_replicas
        # One slot more than sequences: that of padding rows, always greedy.
        self._params = [ParamTable(max_num_seqs + 1) for _ in range(self.num_replicas)]
        self._num_prompt = np.zeros((self.num_replicas, max_num_seqs + 1), np.int32)
        self._step = self.program.step
        shapes = self.program.buffer_shapes()
        self._empty = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes),
        )
        self.buffers: Any = None
        self._compiled: set[tuple[int, bool]] = set()  # tokens, whether some are an image's
        self._encoder: ImageEncoder | None = None
        if model.vision is not None:
            self._encoder = ImageEncoder(
                model.vision, mesh=mesh, sharding=self.program.sharding(PartitionSpec(DATA))
            )
        self._load = jax.jit(_load, donate_argnums=0, out_shardings=shapes.tokens.sharding)
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache (after a step that failed, its donated cache is gone)."""
        if self.buffers is not None:  # else there would be two caches for a moment
            jax.tree.map(lambda leaf: leaf.delete(), self.buffers)
        if self._encoder is not None:
            self._encoder.forget()
        with self._in_mesh():
            self.buffers = self._empty()

    def _in_mesh(self) -> contextlib.AbstractContextManager:
        mesh = self.program.mesh
        return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()

    def num_compiled(self) -> int:
        """How many step shapes have been compiled so far: at most `num_shapes`."""
        return self._step._cache_size()  # type: ignore[attr-defined]

    def precompile(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Compile every shape of a step, by steps without sequences; `progress(how many are done)`.

        With a compilation cache (see `LLM`) later processes only read them.
        """
        nobody: list[list[Scheduled]] = [[] for _ in range(self.num_replicas)]
        self.load(0, 0, [])
        for done, (size, images) in enumerate(self._shapes(), start=1):
            embeddings = None
            if self._encoder and images:
                with self._in_mesh():
                    embeddings = self._encoder.warm_up(size)
            self._run(nobody, [None] * self.num_replicas, size, embeddings).fetch()
            progress(done)

    def load(self, replica: int, slot: int, tokens: Sequence[int]) -> None:
        """Put the tokens that a sequence has into its slot."""
        row = np.zeros(self.program.plan.max_len, np.int32)
        row[: len(tokens)] = tokens
        with self._in_mesh():
            index = np.int32(replica * self.program.max_num_seqs + slot)
            loaded = self._load(self.buffers.tokens, index, row)
        self.buffers = Buffers(self.buffers.cache, loaded)

    def admit(self, replica: int, sequence: Continuation) -> None:
        """Put a sequence's tokens and parameters into its slot."""
        slot = sequence.slot
        assert slot is not None
        self.load(replica, slot, public_ids(sequence.tokens, self.vocab_size))
        self._num_prompt[replica, slot] = sequence.num_prompt
        self._params[replica].set(slot, sequence.params, seed=sequence.seed, sample=sequence.index)

    def dispatch(
        self, shares: list[list[Scheduled]], allocators: Sequence[PageAllocator]
    ) -> Dispatched:
        """Start a step; `shares[replica]` with its `allocators[replica]`. Does not wait."""
        for replica, step in enumerate(shares):
            for share in step:
                if share.fresh:
                    self.admit(replica, share.sequence)
        size, images = self._shape(shares)
        embeddings = None
        if self._encoder and images:
            with self._in_mesh():
                embeddings = self._encoder.embeddings(shares, size)
        return self._run(shares, allocators, size, embeddings)

    @property
    def num_shapes(self) -> int:
        """How many shapes of a step there are."""
        return len(self._shapes())

    def is_compiled(self, shares: list[list[Scheduled]]) -> bool:
        """Whether a step of this shape has run before."""
        return self._shape(shares) in self._compiled

    def _shapes(self) -> list[tuple[int, bool]]:
        kinds = (False, True) if self._encoder else (False,)
        return [(size, images) for images in kinds for size in self.buckets]

    def _shape(self, shares: list[list[Scheduled]]) -> tuple[int, bool]:
        """Tokens of a step, and whether it computes images, on any replica."""
        most = max(sum(share.num_tokens for share in step) for step in shares)
        images = any(share.images for step in shares for share in step)
        return min(size for size in self.buckets if size >= most), images

    def _run(
        self,
        shares: list[list[Scheduled]],
        allocators: Sequence[PageAllocator | None],
        size: int,
        image_embeddings: Array | None,
    ) -> Dispatched:
        rows = min(size, self.program.max_num_seqs)
        parts = [
            self._inputs(
                replica,
                step,
                allocator,
                rows,
                None if image_embeddings is None else _image_spans(step, size),
            )
            for replica, (step, allocator) in enumerate(zip(shares, allocators, strict=True))
        ]
        inputs = parts[0] if len(parts) == 1 else jax.tree.map(lambda *p: np.concatenate(p), *parts)
        everyone = [share for step in shares for share in step]
        asked = Asked.by(
            (share.sequence.params for share in everyone),
            samples=any(share.samples for share in everyone),
        )
        with self._in_mesh():
            # One transfer for all of them: each on its own costs a tenth of a millisecond.
            inputs = jax.device_put(inputs, self.program.sharding(PartitionSpec(DATA)))
            self.buffers, out = self._step(
                self.program.weights,
                self.buffers,
                inputs,
                asked,
                image_embeddings,
                num_tokens=size,
            )
        self._compiled.add((size, image_embeddings is not None))
        wanted = (
            out.chosen,
            out.logprobs if asked.logprobs else None,
            out.prompt_logprobs if asked.prompt_logprobs else None,
        )
        for leaf in jax.tree.leaves(wanted):
            leaf.copy_to_host_async()
        return Dispatched(shares, wanted)

    def _inputs(
        self,
        replica: int,
        step: list[Scheduled],
        allocator: PageAllocator | None,
        rows: int,
        image_spans: Int32[np.ndarray, "tokens 2"] | None,
    ) -> StepInputs:
        """A replica's part of a step, as host arrays. No allocator: no sequences."""
        slots = np.full(rows, self.program.max_num_seqs, np.int32)
        slots[: len(step)] = np.array([share.sequence.slot for share in step], np.int32)
        kv_lens, q_lens = np.zeros((2, rows), np.int32)
        kv_lens[: len(step)] = [share.start + share.num_tokens for share in step]
        q_lens[: len(step)] = [share.num_tokens for share in step]
        samples = np.zeros(rows, bool)
        samples[: len(step)] = [share.samples for share in step]
        ids = [share.sequence.id for share in step]
        tables: list[Any] = [
            allocator.page_table(group, ids, rows=rows, width=width)
            if allocator
            else (np.zeros((rows, width), np.int32), np.zeros(rows, np.int32))
            for group, width in enumerate(self.program.widths)
        ]
        num_prompt = self._num_prompt[replica, slots]
        decode = int((q_lens == 1).sum())
        batch: dict[str, Any] = {
            "kv_lens": kv_lens,
            "cu_q_lens": np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
            "distribution": np.array([decode, len(step), len(step)], np.int32),
            "tables": tuple(PageTable(*table) for table in tables),
        }
        inputs: dict[str, Any] = {
            "batch": RaggedBatch(**batch),
            "slots": slots,
            "num_prompt": num_prompt,
            "samples": samples,
            "params": self._params[replica].rows(slots, kv_lens - num_prompt),
            "image_spans": image_spans,
        }
        return StepInputs(**inputs)


def _image_spans(step: list[Scheduled], size: int) -> Int32[np.ndarray, "tokens 2"]:
    """Of each flat token of a replica's step, start and end of its image; (0, 0) for text."""
    spans = np.zeros((size, 2), np.int32)
    for each, rows in images_of(step):
        spans[rows] = each.start, each.end
    return spans


def _load(tokens: Int32[Array, "slots length"], slot: Array, row: Array) -> Array:
    return tokens.at[slot].set(row)
