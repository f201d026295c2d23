"""The work of the prefill kernel: which blocks of which sequence, and which keys they see."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxattn.kernels.pallas.scalars import ceil_quotient, quotient
from jaxattn.kernels.pallas.tpu_prefill_copies import Copies
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillShape

Scalar = Int32[Array, ""]


class Job(NamedTuple):
    """Some blocks in a row of one sequence."""

    seq: Scalar
    offset: Scalar  # its first query, counted in the sequence's new tokens

    def following(self, copies: Copies, step: int) -> "Job":
        """The next job; of an empty sequence if there is none."""
        more = self.offset + step < copies.q_len(self.seq)
        seq = jnp.where(more, self.seq, self.seq + 1)
        return Job(seq, jnp.where(more, self.offset + step, 0)).skip_empty(copies)

    def skip_empty(self, copies: Copies) -> "Job":
        """Past sequences without new tokens."""
        end = copies.refs.distribution[2]
        last = copies.refs.kv_lens.shape[0] - 1

        def empty(seq: Scalar) -> Array:
            return (seq < end) & (copies.q_len(jnp.minimum(seq, last)) == 0)

        return Job(jax.lax.while_loop(empty, lambda seq: seq + 1, self.seq), self.offset)


class Work:
    """What a job's blocks are and what they see."""

    def __init__(self, shape: PrefillShape, refs: Any, job: Job):
        q_len = refs.cu_q_lens[job.seq + 1] - refs.cu_q_lens[job.seq]
        self.shape, self.refs, self.job = shape, refs, job
        self.token = refs.cu_q_lens[job.seq] + job.offset
        self.rows = jnp.minimum(q_len - job.offset, shape.tiles.queries)
        self.blocks = ceil_quotient(self.rows, shape.tiles.block_q)
        self.first_query = refs.kv_lens[job.seq] - q_len + job.offset
        self.first_key, self.end_key = self.range(0, shape.tiles.blocks)
        self.tiles = ceil_quotient(self.end_key - self.first_key, shape.tiles.block_kv)

    def tile(self, index: Scalar | int) -> tuple[Scalar, Scalar]:
        """The keys of a tile: first and end."""
        first = self.first_key + index * self.shape.tiles.block_kv
        return first, jnp.minimum(first + self.shape.tiles.block_kv, self.end_key)

    def range(self, block: Scalar | int, count: int) -> tuple[Scalar, Scalar]:
        """The keys that some query of these blocks sees are in `first .. end`."""
        shape, refs, kv_len = self.shape, self.refs, self.refs.kv_lens[self.job.seq]
        block_q, window = shape.tiles.block_q, shape.sliding_window
        first_query = self.first_query + block * block_q
        last_query = self.first_query + jnp.minimum((block + count) * block_q, self.rows) - 1
        first, end = jnp.int32(0), kv_len
        if window is not None:
            first = jnp.maximum(first_query - window + 1, 0)
        if shape.causal:
            end = last_query + 1
        elif window is not None:
            end = jnp.minimum(last_query + window, kv_len)
        if refs.reach is not None:
            index = refs.reach_index[self.job.seq] + quotient(self.job.offset, block_q) + block
            for each in range(count):
                there = (block + each) * block_q < self.rows
                entry = jnp.where(there, index + each, index)
                if shape.image_rule == "extend":
                    first = jnp.minimum(first, jnp.maximum(refs.reach[2 * entry], 0))
                end = jnp.maximum(end, jnp.minimum(refs.reach[2 * entry + 1], kv_len))
        return first, end

    def visits(self, block: Scalar, first: Scalar, end: Scalar) -> tuple[Array, Array]:
        """Whether a block sees something of a tile, and whether every query sees all of it."""
        shape, window = self.shape, self.shape.sliding_window
        first_key, end_key = self.range(block, 1)
        something = (block < self.blocks) & (first < end_key) & (end > first_key)
        first_query = self.first_query + block * shape.tiles.block_q
        everything = end - first == shape.tiles.block_kv
        if shape.causal:
            everything &= end - 1 <= first_query
        elif window is not None:
            everything &= end - 1 < first_query + window
        if window is not None:
            everything &= first > first_query + shape.tiles.block_q - 1 - window
        return something, everything
