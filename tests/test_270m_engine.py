"""The engine on real Gemma 3 270M in float32: the reference's greedy tokens, every way."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from jaxattn.cache.pages import PageAllocator
from jaxattn.engine.engine import Engine, plan_engine
from jaxattn.sampling import SamplingParams
from tests.engine_checks import (
    Patience,
    assert_empty,
    assert_sound,
    check_matches,
    least_memory,
    narrow,
)
from tests.test_270m_reference import DATA, real_model

MAX_LEN = 2112
PROMPTS = ("apache600", "gpl2000", "mid48", "short8")  # the second is nearly four windows long


class NoText:
    def step(self, token_id):
        return ""

    def finish(self):
        return ""


@cache
def make_engine(page_size, *, chunk, hybrid=True, least=False):
    """Few shapes, for a step takes longer to compile than to run; `least` memory or enough."""
    options = dict(
        kv_dtype="float32",
        page_size=page_size,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        hybrid_kv_cache=hybrid,
        backend="xla",
    )
    plan, _ = plan_engine(real_model().config, dtype="float32", **options)
    memory = least_memory(plan, max_len=MAX_LEN, step_tokens=chunk) if least else None
    return Engine(real_model(), eos_ids=(), memory=memory, **options)


def add(engine, name, max_tokens):
    prompt = np.load(DATA / f"{name}.npz")["input_ids"].tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return engine.add(prompt, params, seed=0, stream=NoText())


def check(engine, names, max_tokens):
    """Send prompts together; what they got is the reference's. How many tokens were cached."""
    sequences = [add(engine, name, max_tokens) for name in names]
    patience = Patience(engine)
    while engine.has_work:
        engine.step()
        assert_sound(engine)
        patience.check()
    assert_empty(engine)
    for name, sequence in zip(names, sequences, strict=True):
        assert sequence.error is None
        expected = np.load(DATA / f"{name}.npz")["greedy_ids"][:max_tokens]
        assert sequence.new_tokens == expected.tolist(), name
    return [each.num_cached_tokens for each in sequences]


def test_together_cold_and_warm(monkeypatch):
    check_matches(monkeypatch)
    engine = make_engine(32, chunk=256)
    engine.runner.buckets = engine.runner.buckets[-1:]
    narrow(engine, chunk=256, memory=100, prefix_reuse=True)
    assert check(engine, PROMPTS, 6) == [0, 0, 0, 0]
    assert check(engine, PROMPTS[::-1], 6) == [0, 32, 1984, 576]


def test_preempted_in_a_pool_of_one_sequence(monkeypatch):
    monkeypatch.setattr(PageAllocator, "has_room", lambda *_: True)
    engine = make_engine(32, chunk=256)
    engine.runner.buckets = engine.runner.buckets[-1:]
    narrow(engine, chunk=200, memory=1, prefix_reuse=False)
    before = engine.stats().preemptions
    assert check(engine, PROMPTS, 6) == [0, 0, 0, 0]
    assert engine.stats().preemptions > before


@pytest.mark.slow
def test_other_pages_one_group_and_the_least_memory(monkeypatch):
    check_matches(monkeypatch)
    engine = make_engine(16, chunk=256, hybrid=False, least=True)
    engine.runner.buckets = engine.runner.buckets[-1:]
    assert engine.capacity(MAX_LEN) == 1
    assert check(engine, [*PROMPTS, "mid48"], 6)[-1] == 32


ENGINES = [
    dict(page_size=32, chunk=512),
    dict(page_size=16, chunk=512),
    dict(page_size=40, chunk=512, hybrid=False),
    dict(page_size=16, chunk=512, least=True),
    dict(page_size=32, chunk=64, hybrid=False, least=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_64_tokens(options, monkeypatch):
    """Alone, together, reversed, with every chunk size, reuse and memory; then all of it again."""
    check_matches(monkeypatch)
    engine = make_engine(**options)
    engine.runner.buckets = (4, options["chunk"])
    for name in PROMPTS:
        check(engine, [name], 64)
    most = options["chunk"]
    chunks = [size for size in (48, 200, 512) if size <= most]
    for chunk, prefix_reuse in product(chunks, (True, False)):
        for memory in (1,) if options.get("least") else (1, 1.5, 100):
            narrow(engine, chunk=chunk, memory=memory, prefix_reuse=prefix_reuse)
            check(engine, PROMPTS, 64)
            check(engine, [*PROMPTS[::-1], *PROMPTS], 64)
