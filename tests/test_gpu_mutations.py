"""Bugs put into the GPU kernels on purpose: a small check must see every one."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels import mask
from jaxattn.kernels.pallas import gpu, gpu_attend, gpu_combine, gpu_compute, gpu_copy, gpu_work
from tests.attention_cases import expected, fresh_call, make_case, poisoned, run, tolerance

WINDOW = 200
GEOMETRY = {"page_size": 16, "head_dim": 64, "kv_heads": 2, "query_dtype": "bfloat16"}
# Three blocks of threads share 22 key tiles: a head is cut, both slots are used again and again.
DECODE = ((1, 300), (1, 70), (1, 5), (1, 333))
PREFILL = ((130, 330), (7, 7))
# What a check of a broken kernel ends in: wrong numbers, or the interpreter found a race.
CAUGHT = (AssertionError, jax.errors.JaxRuntimeError, RuntimeError)


def check(monkeypatch, *, decode, window=WINDOW, kv_dtype="bfloat16", sinks=None):
    """One of the two launches: its outputs are the oracle's, whatever is in dead rows."""
    attend, combine = gpu.attend, gpu.combine

    def only_attend(*arrays, shape, interpret):
        if shape.decode == decode:
            return attend(*arrays, shape=shape, interpret=interpret)
        return None, None, None

    def only_combine(*arrays, shape, interpret):
        if shape.decode == decode:
            combine(*arrays, shape=shape, interpret=interpret)

    monkeypatch.setattr(gpu, "attend", only_attend)
    monkeypatch.setattr(gpu, "combine", only_combine)
    lengths = DECODE if decode else PREFILL
    count = len(lengths) if decode else 0
    case = make_case(lengths, decode=count, **GEOMETRY, kv_dtype=kv_dtype)
    options = {"sliding_window": window, "sinks": sinks}
    out, _ = run(poisoned(case, window), "pallas_gpu", jitted=fresh_call(), **options)
    out = out.astype(np.float32)
    assert np.isfinite(out).all()
    atol = tolerance("bfloat16", kv_dtype)
    np.testing.assert_allclose(out, expected(case, **options), atol=atol, rtol=atol)


def mutated(module, old, new):
    """The module with a part of its text replaced."""
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} has no {old!r}"
    name = f"{module.__name__}_mutated"
    sys.modules[name] = types.ModuleType(name)  # where dataclasses look a class's module up
    sys.modules[name].__file__ = module.__file__
    try:
        exec(source.replace(old, new), sys.modules[name].__dict__)
        return sys.modules[name]
    finally:
        del sys.modules[name]


# (module, the text, what replaces it, whether decode shows it).
MUTATIONS = {
    "keys are not awaited": (
        gpu_compute,
        "plgpu.barrier_wait(ref.key_full.at[slot])",
        "pass",
        True,
    ),
    "values are not awaited": (
        gpu_compute,
        "plgpu.barrier_wait(ref.value_full.at[slot])",
        "pass",
        True,
    ),
    "a slot is filled while it is read": (
        gpu_copy,
        "plgpu.barrier_wait(ref.free.at[lax.rem(position, jnp.int32(shape.stages))])",
        "pass",
        True,
    ),
    "keys of another slot": (gpu_compute, "ref.key.at[slot, lane", "ref.key.at[0, lane", True),
    "pages of the first sequence": (gpu_copy, "ref.table[sequence, ", "ref.table[0, ", True),
    "dead values are not cleared": (gpu_compute, "    edge = (", "    edge = False & (", True),
    "a warpgroup does not wait for the clearing": (
        gpu_compute,
        "plgpu.barrier_wait(ref.cleared)",
        "pass",
        False,
    ),
    "edges are not masked": (gpu_compute, "on_edge = (", "on_edge = False & (", False),
    "one key too few at the start": (gpu_compute, ") <= key", ") < key", True),
    "one key too many at the end": (gpu_compute, "seen &= key < _by", "seen &= key <= _by", False),
    "the result is not scaled down": (
        gpu_compute,
        "each * _by_row(shrink, shape.lanes) for each in acc",
        "each + 0 * _by_row(shrink, shape.lanes) for each in acc",
        True,
    ),
    "a window too long by one": (
        mask,
        "first = query - (sliding_window - 1)",
        "first = query - sliding_window",
        True,
    ),
    "tiles start off their pages": (
        gpu_work,
        "start = live_from - live_from % shape.page_tokens",
        "start = live_from",
        True,
    ),
    "a block does one tile too few": (
        gpu_work,
        "stop - begin, pieces",
        "stop - begin - 1, pieces",
        True,
    ),
    "the last part of a cut head is forgotten": (
        gpu_work,
        "last_block = (head_end - 1) // share",
        "last_block = (head_end - 1) // share - 1",
        True,
    ),
    "parts are added as they are": (
        gpu_combine,
        "weight = jnp.exp2(each - new_most)",
        "weight = jnp.exp2(0 * each)",
        True,
    ),
    "a part is counted twice": (
        gpu_combine,
        "exists.append(index * LOADS_IN_FLIGHT + offset < count)",
        "exists.append(True)",
        True,
    ),
}
BY_DEFAULT = {
    "values are not awaited",
    "keys of another slot",
    "a window too long by one",
    "the last part of a cut head is forgotten",
}


def replace_in(monkeypatch, module, old, new):
    """Let the launcher use the mutated module."""
    changed = mutated(module, old, new)
    if module is mask:
        changed = mutated(gpu_work, "import visible_range", "import visible_range  #")
        monkeypatch.setattr(changed, "visible_range", mutated(mask, old, new).visible_range)
    for name in ("attend", "combine", "decode_work", "prefill_work", "ranges_of"):
        if hasattr(changed, name):
            monkeypatch.setattr(gpu, name, getattr(changed, name))
    for name in ("compute", "copy"):
        if hasattr(changed, name):
            monkeypatch.setattr(gpu_attend, name, getattr(changed, name))


@pytest.mark.parametrize("decode", [True, False])
def test_as_it_is(monkeypatch, decode):
    check(monkeypatch, decode=decode)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in BY_DEFAULT)) for n in MUTATIONS]
)
def test_a_mutation_is_caught(monkeypatch, name):
    module, old, new, decode = MUTATIONS[name]
    replace_in(monkeypatch, module, old, new)
    with pytest.raises(CAUGHT):
        check(monkeypatch, decode=decode)


def test_sinks_count_once(monkeypatch):
    """In a head that is cut too: added in each part, they would count more than once."""
    sinks = jnp.array([3.0, 4.0, 2.0, 5.0])
    check(monkeypatch, decode=True, window=None, sinks=sinks)
    replace_in(monkeypatch, gpu_compute, "jnp.where(piece.key_tile == 0, 1, 0)", "1")
    with pytest.raises(AssertionError):
        check(monkeypatch, decode=True, window=None, sinks=sinks)
