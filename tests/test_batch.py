"""A ragged batch: where its tokens stand, what its tables may hold, what it refuses."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import PageTable, RaggedBatch
from jaxattn.spec import MaskSpec


def int32(values):
    return jnp.array(values, jnp.int32)


# Decode at 36, three new tokens from 10, none, two from 0, a padding sequence; two padding tokens.
BATCH = RaggedBatch(
    kv_lens=int32([37, 13, 20, 2, 99]),
    cu_q_lens=int32([0, 1, 4, 4, 6, 6]),
    distribution=int32([1, 2, 4]),
    tables=(PageTable(int32([[1, 2], [3, 0], [4, 5], [6, 0], [0, 0]]), int32([2, 0, 0, 0, 0])),),
)


def test_places():
    sequences, positions, real = BATCH.places(8)
    assert sequences.tolist() == [0, 1, 1, 1, 3, 3, 0, 0]
    assert positions.tolist() == [36, 10, 11, 12, 0, 1, 0, 0]
    assert real.tolist() == [True] * 6 + [False] * 2
    assert (sequences.dtype, positions.dtype) == (jnp.int32, jnp.int32)


def test_places_of_padding_sequences_are_not_real():
    stale = replace(BATCH, cu_q_lens=int32([0, 1, 4, 4, 6, 8]))
    assert stale.places(8).real.tolist() == [True] * 6 + [False] * 2


def test_places_are_traceable_and_follow_the_lengths():
    places = jax.jit(lambda batch: batch.places(8))
    np.testing.assert_array_equal(places(BATCH).positions, BATCH.places(8).positions)
    longer = replace(BATCH, kv_lens=BATCH.kv_lens + 5)
    assert places(longer).positions.tolist() == [41, 15, 16, 17, 5, 6, 0, 0]


def test_last_rows():
    assert BATCH.last_rows().tolist() == [0, 3, 3, 5, 5]
    nothing_first = replace(BATCH, cu_q_lens=int32([0, 0, 3, 3, 5, 5]))
    assert nothing_first.last_rows().tolist() == [0, 2, 2, 4, 4]


def test_a_batch_is_a_pytree_of_its_arrays():
    leaves, structure = jax.tree.flatten(BATCH)
    assert len(leaves) == 5 and all(leaf.dtype == jnp.int32 for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, RaggedBatch) and isinstance(again.tables[0], PageTable)


def test_what_a_group_shares_has_no_mask_attribute():
    """The group bug of others: a window read off metadata that windowed and global layers share."""
    shared = {field.name for kind in (RaggedBatch, PageTable) for field in fields(kind)}
    masks = {field.name for field in fields(MaskSpec)} | {"window", "scale", "sm_scale", "heads"}
    assert not shared & masks
    assert {field.name for field in fields(PageTable)} == {"page_indices", "first_page"}


def test_a_good_batch_passes():
    BATCH.check((7,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distribution": int32([2, 1, 4])}, "expected 0 <= decode <= prefill <= total <= seqs"),
        ({"distribution": int32([1, 2, 6])}, "expected 0 <= decode <= prefill <= total <= seqs"),
        ({"distribution": int32([-1, 2, 4])}, "distribution=array"),
        ({"cu_q_lens": int32([1, 2, 4, 4, 6, 6])}, "expected to start at 0 and never to fall"),
        ({"cu_q_lens": int32([0, 1, 4, 3, 6, 6])}, "expected to start at 0 and never to fall"),
        ({"distribution": int32([2, 2, 4])}, "a decode sequence has exactly one new token"),
        ({"distribution": int32([3, 3, 4])}, "a decode sequence has exactly one new token"),
        ({"kv_lens": int32([37, 2, 20, 2, 99])}, "must include the new tokens"),
        ({"tables": ()}, "0 page tables for 1 groups"),
        ({"tables": BATCH.tables * 2}, "2 page tables for 1 groups"),
    ],
)
def test_host_values_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BATCH, **changes).check((7,))


@pytest.mark.parametrize("page", [-1, 7, 2**31 - 1])
def test_pages_outside_the_pool_are_refused(page):
    table = BATCH.tables[0]
    bad = replace(table, page_indices=table.page_indices.at[2, 1].set(page))
    with pytest.raises(ValueError, match="group 1: page ids outside 0 to 6"):
        replace(BATCH, tables=(table, bad)).check((7, 7))
