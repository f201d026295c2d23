"""The step that is compiled: new tokens through the model, and the next token of every sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxattn.batch import RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState
from jaxattn.engine.sampler import (
    Asked,
    RowParams,
    TopLogprobs,
    choose,
    no_logprobs,
    token_history,
    top_logprobs,
)
from jaxattn.models.gemma3.model import Gemma3

_SCORE_ROWS = 32  # prompt tokens whose whole logits exist at one time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Buffers:
    """What stays on the device from step to step. Donated in, returned out.

    `tokens[slot, position]`: the tokens of the sequence in each slot, as far as they are chosen,
    so that a step can follow another before the host has seen what that one chose.
    """

    cache: CacheState
    tokens: Int32[Array, "slots max_len"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the host says of a step. Row s of everything is sequence s of the batch.

    `samples`: rows that choose a token. `image_spans`: of each flat token, absolute start and end
    of its image, equal for text; None in a step of text alone.
    """

    batch: RaggedBatch
    slots: Int32[Array, "rows"]
    num_prompt: Int32[Array, "rows"]
    samples: Bool[Array, "rows"]
    params: RowParams
    image_spans: Int32[Array, "tokens 2"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """Chosen tokens (0 in rows that sample none), and the scores that were wanted, else zeros."""

    chosen: Int32[Array, "rows"]
    logprobs: TopLogprobs  # of each row's chosen token
    prompt_logprobs: TopLogprobs  # of each flat token's successor


def make_step(
    model: Gemma3, plan: CachePlan, **attention: Any
) -> tuple[list[Array], Callable[..., tuple[Buffers, StepOutputs]]]:
    """The text model's weights, flat, and
    `step(weights, buffers, inputs, asked, image_embeddings, num_tokens=...)`.

    `num_tokens` is static: the flat tokens of the step, padding included. `image_embeddings` are
    None where the inputs have no `image_spans`.
    """
    # A step does not run the tower.
    graph, tower, state = nnx.split(model, _in_tower, ...)  # type: ignore[misc]
    # Flat: flattening the nested state in Python would cost each step a millisecond.
    weights, tree = jax.tree.flatten(state)

    def step(
        weights: list[Array],
        buffers: Buffers,
        inputs: StepInputs,
        asked: Asked,
        image_embeddings: Float[Array, "tokens embed"] | None = None,
        *,
        num_tokens: int,
    ) -> tuple[Buffers, StepOutputs]:
        model = nnx.merge(graph, tower, jax.tree.unflatten(tree, weights))
        images = {"image_embeddings": image_embeddings, "image_spans": inputs.image_spans}
        return _step(model, plan, attention | images, buffers, inputs, asked, num_tokens)

    return weights, step


def _in_tower(path: tuple[Any, ...], leaf: Any) -> bool:
    return path[0] == "vision"


def _step(
    model: Gemma3,
    plan: CachePlan,
    attention: dict[str, Any],
    buffers: Buffers,
    inputs: StepInputs,
    asked: Asked,
    num_tokens: int,
) -> tuple[Buffers, StepOutputs]:
    batch, slots = inputs.batch, inputs.slots
    places = batch.places(num_tokens)
    own_slot = slots[places.sequences]
    following = jnp.stack([places.positions, places.positions + 1])
    token_ids, targets = buffers.tokens.at[own_slot[None], following].get(mode="clip")
    hidden, cache = model(token_ids, buffers.cache, plan=plan, batch=batch, **attention)
    rows, vocab = len(slots), model.config.vocab_size

    def sampled(last: Float[Array, "rows embed"]) -> tuple[Int32[Array, "rows"], TopLogprobs]:
        # Not to be computed again for each of its readers: 2 of 33 ms on CPU.
        logits = jax.lax.optimization_barrier(model.logits(last))
        history = partial(
            token_history, buffers.tokens[slots], inputs.num_prompt, batch.kv_lens, vocab
        )
        chosen = choose(logits, inputs.params, asked, history)
        scores = jax.lax.cond(
            asked.logprobs, top_logprobs, lambda *_: no_logprobs(rows, vocab), logits, chosen
        )
        return jnp.where(inputs.samples, chosen, 0), scores

    chosen, logprobs = jax.lax.cond(
        asked.samples,
        sampled,
        lambda _: (jnp.zeros(rows, jnp.int32), no_logprobs(rows, vocab)),
        hidden[batch.last_rows()],
    )
    prompt_logprobs = jax.lax.cond(
        asked.prompt_logprobs,
        partial(_score, model),
        lambda *_: no_logprobs(num_tokens, vocab),
        hidden,
        targets,
    )
    # Out of range, and so dropped, for rows that choose none: the place holds a prompt's token.
    target_slot = jnp.where(inputs.samples, slots, len(buffers.tokens))
    tokens = buffers.tokens.at[target_slot, batch.kv_lens].set(chosen, mode="drop")
    return Buffers(cache, tokens), StepOutputs(chosen, logprobs, prompt_logprobs)


def _score(
    model: Gemma3, hidden: Float[Array, "tokens embed"], targets: Int32[Array, "tokens"]
) -> TopLogprobs:
    """Log-probability of each row's target token, a few rows' logits at a time."""
    blocks = jax.tree.map(
        lambda rows: jnp.pad(
            rows, [(0, -len(rows) % _SCORE_ROWS)] + [(0, 0)] * (rows.ndim - 1)
        ).reshape(-1, _SCORE_ROWS, *rows.shape[1:]),
        (hidden, targets),
    )
    scores = jax.lax.map(lambda block: top_logprobs(model.logits(block[0]), block[1]), blocks)
    return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:])[: len(targets)], scores)
