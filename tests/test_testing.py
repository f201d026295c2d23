"""A backend of one's own: taken as `backend=`, refused what it lacks, and held to the suite."""

from dataclasses import replace

import numpy as np
import pytest

from jaxattn import Backend, Capabilities, UnsupportedAttentionError, ragged_paged_attention
from jaxattn.kernels import reference
from jaxattn.registry import CAPABILITIES, check_backend_name
from jaxattn.sampling import SamplingParams
from jaxattn.testing import check_backend
from jaxattn.testing.cases import make_case
from tests import tiny_model

# One cell of each kind, so that the suite takes seconds.
ROW = Capabilities(
    backend="mine",
    what="the reference, by another name",
    sliding_window=True,
    head_dims=(8,),
    page_sizes=(8, 8),
    q_heads_per_kv_head=(1, 2),
    query_dtypes=("float32",),
    kv_dtypes=("float32",),
)


def arguments(case):
    pages = case.pages()
    places = case.kv_lens, case.table, case.cu_q_lens, case.distribution
    return case.queries, case.keys, case.values, pages, *places


def test_it_runs_by_its_own_kernel():
    calls = []

    def kernel(*arrays, **options):
        calls.append(options["sliding_window"])
        return reference.ragged_paged_attention(*arrays, **options)

    arrays = arguments(make_case([(2, 20)], page_size=8))
    options = {"sm_scale": 1.0, "sliding_window": 3}
    out, _ = ragged_paged_attention(*arrays, backend=Backend(ROW, kernel), **options)
    same, _ = ragged_paged_attention(*arrays, backend="reference", **options)
    assert calls == [3] and np.array_equal(out, same)


def test_what_its_row_lacks_is_refused_before_it_is_called():
    row = replace(ROW, sliding_window=False)
    arrays = arguments(make_case([(2, 20)], page_size=8, head_dim=16))
    with pytest.raises(UnsupportedAttentionError, match=r"(?s)mine: sliding_window=3.*head_dim=16"):
        ragged_paged_attention(
            *arrays, sm_scale=1.0, sliding_window=3, backend=Backend(row, pytest.fail)
        )


def test_a_row_without_a_name_of_its_own_is_refused():
    with pytest.raises(ValueError, match="'xla' is a backend of jaxattn"):
        Backend(CAPABILITIES["xla"], reference.ragged_paged_attention)
    with pytest.raises(TypeError, match=r"row='xla': expected a jaxattn.registry.Capabilities"):
        Backend("xla", reference.ragged_paged_attention)
    with pytest.raises(TypeError, match="kernel=None: expected a function"):
        Backend(ROW, None)
    with pytest.raises(ValueError, match="backend='mine': the backends are"):
        check_backend_name("mine")


def test_it_cannot_be_interpreted():
    arrays = arguments(make_case([(2, 20)], page_size=8))
    backend = Backend(ROW, reference.ragged_paged_attention)
    with pytest.raises(ValueError, match=r"interpret= with backend=.*name one of pallas_tpu"):
        ragged_paged_attention(*arrays, sm_scale=1.0, backend=backend, interpret=True)


def test_the_engine_runs_on_it():
    row = replace(CAPABILITIES["reference"], backend="mine")
    tokens = []
    for backend in ("xla", Backend(row, reference.ragged_paged_attention)):
        engine = tiny_model.engine(backend=backend)
        params = SamplingParams(max_tokens=8, temperature=0)
        sequence = engine.add([5, 6, 7], params, seed=0, stream=tiny_model.PlainText())
        while engine.has_work:
            engine.step()
        tokens.append(sequence.new_tokens)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8


def test_the_suite_passes_the_reference():
    passed = check_backend(Backend(ROW, reference.ragged_paged_attention))
    assert {"head_dim 8", "window 11", "dead pages do not matter", "refuses sinks"} <= set(passed)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_the_suite_passes_a_row_by_name(backend):
    assert len(check_backend(backend)) > 30


def forgets_the_window(*arrays, **options):
    return reference.ragged_paged_attention(*arrays, **options | {"sliding_window": None})


def one_key_too_many(*arrays, sliding_window, **options):
    window = None if sliding_window is None else sliding_window + 1
    return reference.ragged_paged_attention(*arrays, sliding_window=window, **options)


def forgets_to_write(queries, keys, values, kv_pages, *arrays, **options):
    out, _ = reference.ragged_paged_attention(queries, keys, values, kv_pages, *arrays, **options)
    return out, kv_pages


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (forgets_the_window, "window 1: .*window 11: .*dead pages do not matter: "),
        (one_key_too_many, "head_dim 8: .*window 11: .*dead pages do not matter: .*NaN"),
        (forgets_to_write, "head_dim 8: .*chunks equal one shot: "),
    ],
)
def test_the_suite_finds(kernel, found):
    with pytest.raises(AssertionError, match=f"(?s)checks failed:.*{found}"):
        check_backend(Backend(ROW, kernel))
