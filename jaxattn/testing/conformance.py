"""One suite for every backend, generated from its row: what is claimed equals the oracle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.attention import ragged_paged_attention
from jaxattn.kernels.layout import page_array
from jaxattn.registry import ANY, CAPABILITIES, Backend, Capabilities, UnsupportedAttentionError
from jaxattn.testing.cases import (
    SCALE,
    Case,
    bits,
    expected,
    expected_pool,
    laid_out,
    live_only,
    make_case,
    poisoned,
    tolerance,
    with_images,
    written,
)

WINDOW = 11  # no page size divides it, nor the other way round
# Decode, a single token, a sequence of none with and without a past, chunks past three windows.
MIXED = ((1, 37), (1, 1), (1, 16), (9, 9), (0, 0), (6, 50), (0, 21), (1, 8), (12, 12))
IMAGES = {3: [(2, 7)], 5: [(45, 49)], 8: [(0, 3), (3, 12)]}


def page_size_of(row: Capabilities, wanted: int) -> int:
    """`wanted`, or the nearest page size that the row claims."""
    if row.page_sizes is ANY:
        return wanted
    return min(max(wanted, row.page_sizes[0]), row.page_sizes[1])


def dtypes_of(row: Capabilities) -> dict[str, str]:
    """The first dtypes that the row claims."""
    return {"query_dtype": row.query_dtypes[0], "kv_dtype": row.kv_dtypes[0]}


def tolerance_of(row: Capabilities) -> float:
    """For cases of `dtypes_of(row)`."""
    return tolerance(**dtypes_of(row))


def base(row: Capabilities) -> dict[str, Any]:
    """A geometry inside the row's claims."""

    def clip(value: int, limits: tuple[int, int] | None) -> int:
        return value if limits is ANY else min(max(value, limits[0]), limits[1])

    return {
        "head_dim": min(row.head_dims or (8,)),
        "page_size": page_size_of(row, 8),
        "ratio": clip(2, row.q_heads_per_kv_head),
        **dtypes_of(row),
    }


def mixed(
    row: Capabilities,
    lengths: Sequence[tuple[int, int]] = MIXED,
    decode: int = 3,
    **geometry: Any,
) -> Case:
    """A batch in one common shape, with a table wider than any sequence needs."""
    geometry = base(row) | geometry
    if jnp.dtype(geometry["kv_dtype"]).itemsize == 1:
        step = row.quantized_page_multiple
        geometry["page_size"] = -(-geometry["page_size"] // step) * step
    width = -(-50 // geometry["page_size"]) + 3
    return make_case(lengths, decode=decode, tokens=40, seqs=11, width=width, **geometry)


def within(limits: tuple[int, int] | None, *values: int) -> tuple[int, ...]:
    """The limits themselves and those values between them."""
    if limits is ANY:
        return values
    return tuple(sorted({*limits, *(v for v in values if limits[0] <= v <= limits[1])}))


def claimed_page_sizes(row: Capabilities, *sizes: int) -> list[int]:
    """The least and the largest, and those of `sizes` between them that the row claims."""
    every = within(row.page_sizes, *sizes)
    return [size for size in every if not (row.page_sizes_of_two and size & (size - 1))]


def claimed_geometries(row: Capabilities) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every claimed head_dim, page size, ratio and pair of dtypes, one at a time."""
    for head_dim in row.head_dims or (8, 40):
        yield f"head_dim {head_dim}", {"head_dim": head_dim}
    for page_size in claimed_page_sizes(row, 1, 8, 16, 40):
        yield f"page_size {page_size}", {"page_size": page_size}
    for ratio in within(row.q_heads_per_kv_head, 1, 3, 40):
        yield f"ratio {ratio}", {"ratio": ratio, "kv_heads": 2}
    for query_dtype, kv_dtype in product(row.query_dtypes, row.kv_dtypes):
        geometry = {"query_dtype": query_dtype, "kv_dtype": kv_dtype}
        yield f"{query_dtype} on {kv_dtype}", geometry


def claimed_features(row: Capabilities) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every claimed feature alone, and all at once: (name, arguments, image spans or not)."""
    everything: dict[str, Any] = {}
    images = False
    if row.soft_cap:
        everything["soft_cap"] = 0.7
        yield "soft_cap", {"soft_cap": 0.7}, False
    if row.sinks:
        everything["sinks"] = jnp.array([0.5, -1.0, 2.0, 0.0])
        yield "sinks", {"sinks": everything["sinks"]}, False
    if row.non_causal:
        yield "non-causal", {"causal": False}, False
    for rule in row.image_rules:
        if rule != "none":
            images, everything["image_rule"] = True, rule
            yield f"image {rule}", {"image_rule": rule}, True
            if row.non_causal:
                yield f"image {rule} non-causal", {"image_rule": rule, "causal": False}, True
    yield "everything", everything, images


def check(case: Case, out: np.ndarray, atol: float, **mask: Any) -> None:
    """Outputs are the oracle's, and padding is exactly zero."""
    assert out.dtype == case.queries.dtype
    np.testing.assert_allclose(out.astype(np.float32), expected(case, **mask), atol=atol, rtol=atol)
    assert not out[case.num_tokens :].any()


def check_pool(case: Case, pages: Any) -> None:
    """The whole pool: new rows in place, all else as it was, the null page zero."""
    wanted = laid_out(*expected_pool(case))
    assert np.array_equal(bits(page_array(pages)), bits(page_array(wanted)))
    assert not page_array(pages)[0].any()
    if case.scales is not None:
        # A scale is a quotient, which a compiled program may round otherwise than an eager one.
        np.testing.assert_allclose(pages.scales, wanted.scales, rtol=3e-7)
        assert not pages.scales[0].any()


def check_backend(backend: str | Backend) -> tuple[str, ...]:
    """Hold a backend to the float32 reference in all that its row claims, on this device.

    Every claimed geometry, window and feature on mixed batches; all of the pool after the write;
    NaN in every dead page and stale ids in every dead column; chunks against one shot; tables of
    live pages; and a refusal of what is not claimed. Takes a minute for a small row.

    Returns:
        The names of the checks, all passed.

    Raises:
        AssertionError: names every check that failed, and why.
    """
    row = backend.row if isinstance(backend, Backend) else CAPABILITIES[backend]
    call = partial(_run, jax.jit(partial(_attention, backend), static_argnames=_STATIC))
    passed, failed = [], []
    for name, ask in _checks(row):
        try:
            ask(call)
        except Exception as error:  # whatever a kernel under test may raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            failed.append(f"{name}: {type(error).__name__}: {'; '.join(lines[:4])}")
        else:
            passed.append(name)
    if failed:
        total = len(passed) + len(failed)
        raise AssertionError("\n  ".join([f"{len(failed)} of {total} checks failed:", *failed]))
    return tuple(passed)


_Call = Callable[..., tuple[np.ndarray, Any]]
_STATIC = ("sm_scale", "sliding_window", "soft_cap", "image_rule", "causal", "update_kv_cache")


def _attention(backend: str | Backend, *arrays: Any, **options: Any) -> Any:
    return ragged_paged_attention(*arrays, backend=backend, **options)


def _run(jitted: Callable, case: Case, *, pages: Any = None, **options: Any) -> Any:
    """Output and pages as numpy; `pages` instead of the case's."""
    out, pages = jitted(
        *map(jnp.asarray, (case.queries, case.keys, case.values)),
        case.pages() if pages is None else pages,
        *map(jnp.asarray, (case.kv_lens, case.table, case.cu_q_lens, case.distribution)),
        sm_scale=SCALE,
        first_page=None if case.first_page is None else jnp.asarray(case.first_page),
        image_spans=None if case.image_spans is None else jnp.asarray(case.image_spans),
        **options,
    )
    return np.asarray(out), jax.tree.map(np.asarray, pages)


def _checks(row: Capabilities) -> Iterator[tuple[str, Callable[[_Call], None]]]:
    """What to ask of a row: a name, and a function of the call that raises if it is wrong."""
    window = WINDOW if row.sliding_window else None
    for name, geometry in claimed_geometries(row):
        yield name, partial(_equals, row, mixed(row, **geometry), window)
    for width in (None, 1, WINDOW, 64):
        if width is None or row.sliding_window:
            yield f"window {width}", partial(_equals, row, mixed(row), width)
    for name, features, images in claimed_features(row):
        if features:
            yield name, partial(_honours, row, window, features, images)
    yield "chunks equal one shot", partial(_chunks, row, window)
    yield "dead pages do not matter", partial(_dead_pages, row, window)
    if row.first_page:
        live = live_only(mixed(row), window)
        yield "tables of live pages only", partial(_equals, row, live, window)
    if row.shared_kv:
        yield "reading only writes nothing", partial(_reads_only, row, window)
    for name, options in _unclaimed(row):
        yield f"refuses {name}", partial(_refuses, row, options)


def _equals(row: Capabilities, case: Case, window: int | None, call: _Call) -> None:
    out, pages = call(case, sliding_window=window)
    atol = tolerance(case.queries.dtype.name, case.pool.dtype.name)
    check(case, out, atol, sliding_window=window)
    check_pool(case, pages)


def _honours(
    row: Capabilities, window: int | None, features: dict[str, Any], images: bool, call: _Call
) -> None:
    """A feature that is accepted is not dropped: without it the oracle says something else."""
    heads: dict[str, Any] = {"ratio": 2} if "sinks" in features else {}
    case = mixed(row, kv_heads=2, **heads)
    plain = expected(case, sliding_window=window)
    case = with_images(case, IMAGES) if images else case
    out, _ = call(case, sliding_window=window, **features)
    check(case, out, tolerance_of(row), sliding_window=window, **features)
    assert np.abs(out.astype(np.float32) - plain).max() > 1e-2, "the feature changes nothing"


def _chunks(row: Capabilities, window: int | None, call: _Call) -> None:
    """The pages travel from chunk to chunk."""
    length = 31
    whole = make_case([(length, length)], tokens=32, **base(row))
    for chunk in (1, 7, 16):
        pages, rows = replace(whole, pool=np.zeros_like(whole.pool)).pages(), []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            queries, keys, values = (
                np.concatenate([each[start:end], np.zeros_like(each[: 16 - end + start])])
                for each in (whole.queries, whole.keys, whole.values)
            )
            step = replace(
                whole,
                queries=queries,
                keys=keys,
                values=values,
                kv_lens=np.array([end], np.int32),
                cu_q_lens=np.array([0, end - start], np.int32),
                lengths=((end - start, end),),
            )
            out, pages = call(step, pages=jax.tree.map(jnp.asarray, pages), sliding_window=window)
            rows.append(out[: end - start])
        atol = tolerance_of(row)
        wanted = expected(whole, sliding_window=window)[:length]
        out = np.concatenate(rows).astype(np.float32)
        np.testing.assert_allclose(out, wanted, atol=atol, rtol=atol)
        check_pool(whole, pages)


def _dead_pages(row: Capabilities, window: int | None, call: _Call) -> None:
    """NaN in all that is dead and garbage in every dead column: equal to the bit."""
    case = mixed(row)
    clean, _ = call(case, sliding_window=window)
    bad = poisoned(case, window)
    out, pages = call(bad, sliding_window=window)
    assert np.isfinite(out.astype(np.float32)).all(), "NaN of a dead page is in the output"
    assert np.array_equal(bits(out), bits(clean)), "a dead page changes the output"
    check_pool(bad, pages)


def _reads_only(row: Capabilities, window: int | None, call: _Call) -> None:
    """`update_kv_cache=False`: the keys and values given are not looked at (they are NaN)."""
    case = written(mixed(row))
    out, pages = call(case, sliding_window=window, update_kv_cache=False)
    check(case, out, tolerance_of(row), sliding_window=window)
    before, after = jax.tree.leaves(case.pages()), jax.tree.leaves(pages)
    assert all(np.array_equal(bits(x), bits(y)) for x, y in zip(after, before, strict=True))


def _unclaimed(row: Capabilities) -> Iterator[tuple[str, dict[str, Any]]]:
    if not row.sliding_window:
        yield "a window", {"sliding_window": WINDOW}
    if not row.soft_cap:
        yield "a soft cap", {"soft_cap": 0.7}
    if not row.sinks:
        yield "sinks", {"sinks": jnp.zeros(mixed(row).queries.shape[1])}
    if not row.non_causal:
        yield "causal=False", {"causal": False}
    if not row.shared_kv:
        yield "layers that share KV", {"update_kv_cache": False}


def _refuses(row: Capabilities, options: dict[str, Any], call: _Call) -> None:
    try:
        call(mixed(row), **options)
    except UnsupportedAttentionError:
        return
    raise AssertionError("it was not refused")
