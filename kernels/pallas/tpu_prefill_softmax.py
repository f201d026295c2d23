"""The inner loop of the prefill kernel: an online softmax, transposed, three heads of work deep.

Scores are kept as `[keys, queries]`: keys on sublanes, queries on lanes. A query's maximum is then
a maximum over registers, its statistics fill one row and not a column of lanes, and the weights
come out as the operand that `values^T @ weights` wants. The denominator is one more row of that
product: `values^T` ends in rows of ones.

Work comes in units: a few streams (up to 256 lanes: query heads of one kv head, times the queries
of a block). While a unit's scores are made, the unit before it gets its weights, and the one
before that its output:

    step        0     1     2     3
    scores      a     b     c     d        one straight block of code: no stage of a step waits
    weights           a     b     c        for another, so all units of the chip are busy
    output                  a     b

Stages hand over in VMEM, each reading what the step before left there, and then overwriting it.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.mask import sees
from jaxattn.kernels.pallas.products import dot
from jaxattn.kernels.pallas.scalars import quotient
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillShape
from jaxattn.kernels.pallas.words import Ref

HIDDEN = -2e30  # a score that is not seen; finite: hidden - hidden is 0, not NaN
LOWEST = -1e30  # the running maximum of nothing: exp2(HIDDEN - LOWEST) is 0
CHUNK = 128  # keys of one product of scores
Scalar = Int32[Array, ""]


class Unit(NamedTuple):
    """`streams` consecutive streams of one block against one tile."""

    state: Scalar | int  # of its first stream: `block * streams + stream`; the last is nobody's
    block: Scalar | int
    number: Scalar | int  # which of the block's units
    values: Scalar | int  # slot of the tile's values


class Sight(NamedTuple):
    """What a block's queries see of a tile."""

    first_query: Scalar  # position of the block's first query
    first_key: Scalar  # position of the tile's first key
    end_key: Scalar  # keys from here on are not there
    spans: Ref | None  # [8, block_q]: start and end of each query's image


class Softmax:
    """The stages, and the scratch memory between them."""

    def __init__(self, shape: PrefillShape, refs: Any):
        self.shape, self.refs = shape, refs

    @property
    def nobody(self) -> Unit:
        """A unit without work, for the ends of the pipeline."""
        return Unit(self.shape.tiles.blocks * self.shape.num_streams, 0, 0, 0)

    def start(self, block: Scalar) -> None:
        """Nothing seen yet."""
        count = self.shape.num_streams
        for stream in range(count):
            state = block * count + stream
            self.refs.top[state] = jnp.full(self.refs.top.shape[1:], LOWEST, jnp.float32)
            self.refs.acc[state] = jnp.zeros(self.refs.acc.shape[1:], jnp.float32)

    def hide(self, sight: Sight) -> None:
        """Prepare what `step` adds to the scores of a block at an edge."""
        shape = self.shape
        chunk, block_q = min(CHUNK, shape.tiles.block_kv), shape.tiles.block_q
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, block_q), 1)
        span = None
        if sight.spans is not None:
            span = sight.spans[0:1], sight.spans[1:2]
        for first in range(0, shape.tiles.block_kv, chunk):
            key = jax.lax.broadcasted_iota(jnp.int32, (chunk, block_q), 0)
            key += sight.first_key + first
            seen = sees(
                sight.first_query + lane,
                key,
                span,
                sliding_window=shape.sliding_window,
                causal=shape.causal,
                image_rule=shape.image_rule,
            )
            if not shape.causal or span is not None:  # a causal query is before the end itself
                seen &= key < sight.end_key
            self.refs.hidden[first : first + chunk] = jnp.where(seen, 0.0, HIDDEN)

    def step(self, output: Unit, weights: Unit | None, scores: Unit | None, *, edge: bool) -> None:
        """One step of the pipeline. At an `edge` what was prepared by `hide` is hidden."""
        streams = range(self.shape.unit_streams)
        for stream in streams:
            self._output(output, stream)
        if weights is not None:
            for stream in streams:
                self._weights(weights, stream)
        if scores is not None:
            for stream in streams:
                self._scores(scores, stream, edge)

    def _head(self, unit: Unit, index: int) -> Scalar | int:
        """The kv head of a stream."""
        streams, per_head = self.shape.unit_streams, self.shape.streams_per_head
        if streams % per_head == 0:
            return unit.number * (streams // per_head) + index // per_head
        return quotient(jnp.asarray(unit.number * streams + index), per_head)

    def _scores(self, unit: Unit, index: int, edge: bool) -> None:
        shape, refs = self.shape, self.refs
        first_head = (unit.number * shape.unit_streams + index) * shape.stream_heads
        query = jnp.concatenate(
            [refs.query[unit.block, first_head + head] for head in range(shape.stream_heads)]
        )
        head = self._head(unit, index)
        chunk = min(CHUNK, shape.tiles.block_kv)
        tops = []
        for first in range(0, shape.tiles.block_kv, chunk):
            scores = dot(refs.keys[head, first : first + chunk], query, ((1,), (1,)))
            if shape.soft_cap is not None:
                scores = jnp.tanh(scores) * shape.score_scale
            if edge:  # once a block and tile, not once a stream: a comparison costs more
                hidden = refs.hidden[first : first + chunk]
                scores += jnp.concatenate([hidden] * shape.stream_heads, axis=1)
            refs.scores[index, first : first + chunk] = scores
            tops.append(jnp.max(scores.reshape(chunk // 8, 8, shape.lanes), axis=0))
        most = jnp.max(reduce(jnp.maximum, tops), axis=0, keepdims=True)
        refs.tile_top[index] = jnp.broadcast_to(most, (8, shape.lanes))

    def _weights(self, unit: Unit, index: int) -> None:
        refs, state = self.refs, unit.state + index
        old = refs.top[state]
        top = jnp.maximum(old, refs.tile_top[index])
        refs.top[state] = top
        refs.shrink[index] = jnp.exp2(old - top)
        top = jnp.concatenate([top, top], axis=0)
        for key in range(0, self.shape.tiles.block_kv, 16):
            weights = jnp.exp2(refs.scores[index, key : key + 16] - top)
            refs.weights[index, key : key + 16] = weights.astype(refs.weights.dtype)

    def _output(self, unit: Unit, index: int) -> None:
        refs, state = self.refs, unit.state + index
        values = refs.values[unit.values, self._head(unit, index)]
        out = dot(values, refs.weights[index], ((1,), (0,)))
        rows = (out.shape[0] // 8, 8, out.shape[1])
        acc = refs.acc[state].reshape(rows) * refs.shrink[index][None] + out.reshape(rows)
        refs.acc[state] = acc.reshape(out.shape)

    def finish(self, block: Scalar) -> Iterable[tuple[int, Float[Array, "block_q value_dim"]]]:
        """(query head, its output) for all heads of a block; a query that sees nothing gives 0."""
        shape, refs = self.shape, self.refs
        block_q = shape.tiles.block_q
        for stream in range(shape.num_streams):
            state = block * shape.num_streams + stream
            total = refs.acc[state, shape.value_dim : shape.value_dim + 1]
            factor = jnp.ones_like(total)
            heads = range(stream * shape.stream_heads, (stream + 1) * shape.stream_heads)
            if refs.sinks is not None:
                each = [jnp.full((1, block_q), refs.sinks[head], jnp.float32) for head in heads]
                sink = jnp.concatenate(each, axis=1)
                before = refs.top[state, :1]
                top = jnp.maximum(before, sink)
                factor = jnp.exp2(before - top)
                total = total * factor + jnp.exp2(sink - top)
            factor = jnp.where(total == 0, 0.0, factor / total)
            out = refs.acc[state, : shape.value_dim] * factor
            for index, head in enumerate(heads):
                yield head, out[:, index * block_q : (index + 1) * block_q].T
