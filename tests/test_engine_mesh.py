"""The engine on eight devices: the same tokens as on one, however they are shared."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxattn.engine.devices import make_mesh, place_weights
from jaxattn.engine.engine import plan_engine
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import random_weights, shared_config
from jaxattn.sampling import SamplingParams
from jaxattn.sharding import DATA, HEADS
from tests import tiny_model
from tests.tiny_model import VOCAB, PlainText

# Four kv heads, and a vocabulary that eight devices can share.
CONFIG = dataclasses.replace(
    tiny_model.config(), num_q_heads=8, num_kv_heads=4, vocab_size=VOCAB + 4
)
SHARES = [  # tensor, data; each takes a minute to compile on two cores. 8: kv heads are repeated
    (2, 4),
    pytest.param(8, 1, marks=pytest.mark.slow),
    pytest.param(1, 8, marks=pytest.mark.slow),
    pytest.param(4, 2, marks=pytest.mark.slow),
]


def weights():
    arrays = random_weights(CONFIG, jax.random.key(1), scale=0.3)
    gained = arrays | {"embed": 0.1 * arrays["embed"], "final_norm": 12 + arrays["final_norm"]}
    return {name: np.asarray(array) for name, array in gained.items()}


@cache
def engine(tensor, data):
    mesh = make_mesh(tensor_parallel=tensor, data_parallel=data)
    model = Gemma3(shared_config(CONFIG, tensor), place_weights(CONFIG, weights(), mesh))
    return tiny_model.engine(model, mesh=mesh, max_num_batched_tokens=2, max_num_seqs=2)


def requests():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (1, 9, 30, 17, 45, 2, 30, 8, 50, 5, 12)]
    greedy = SamplingParams(max_tokens=10, temperature=0, logprobs=2, prompt_logprobs=0)
    random = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, presence_penalty=0.5)
    return [(prompt, greedy if n % 3 else random) for n, prompt in enumerate([*prompts, *prompts])]


def run(engine):
    sequences = [
        engine.add(prompt, params, seed=5, stream=PlainText()) for prompt, params in requests()
    ]
    while engine.has_work:
        engine.step()
        for each in engine.schedulers:
            each.allocator.check()
    for each in engine.schedulers:
        assert each.allocator.free_pages == tuple(count - 1 for count in engine.num_pages)
    assert not [each.error for each in sequences if each.error]
    return sequences


@pytest.fixture(scope="module")
def expected():
    return run(engine(1, 1))


@pytest.mark.parametrize(("tensor", "data"), SHARES)
def test_shared_among_devices_equals_one_device(expected, tensor, data):
    shared = engine(tensor, data)
    for once in range(2):
        for ours, alone in zip(run(shared), expected, strict=True):
            assert ours.new_tokens == alone.new_tokens
            for mine, theirs in zip(
                (*ours.logprobs, *ours.prompt_logprobs),
                (*alone.logprobs, *alone.prompt_logprobs),
                strict=True,
            ):
                assert mine.keys() == theirs.keys()
                for token, entry in mine.items():
                    assert entry.logprob == pytest.approx(theirs[token].logprob, abs=2e-4)
        assert shared.runner.num_compiled() <= len(shared.buckets), once
    stats = shared.stats()
    assert stats.pages_total == tuple(data * (count - 1) for count in shared.num_pages)
    for pages in jax.tree.leaves(shared.runner.buffers.cache):
        assert pages.addressable_shards[0].data.size * tensor * data == pages.size
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(shared.runner.buffers.cache))
    sizes = enumerate(shared.num_pages)
    assert stored == data * sum(count * shared.plan.page_bytes(group) for group, count in sizes)
    heads = max(CONFIG.num_kv_heads, tensor) / CONFIG.num_kv_heads
    alone = engine(1, 1).plan
    assert shared.plan.page_bytes(0) == heads * alone.page_bytes(0)


def test_a_replica_finds_what_it_has_computed():
    shared, prompt = engine(2, 4), requests()[2][0]
    again = []
    for _ in range(2):
        each = shared.add(prompt, SamplingParams(max_tokens=4), seed=0, stream=PlainText())
        while shared.has_work:
            shared.step()
        again.append(each)
    assert again[1].num_cached_tokens > 0
    assert again[0].new_tokens == again[1].new_tokens


def test_replicas_share_the_requests():
    shared = engine(2, 4)
    for prompt, params in requests()[:8]:
        shared.add(prompt, params, seed=0, stream=PlainText())
    assert [len(each.waiting) for each in shared.schedulers] == [2] * 4
    while shared.has_work:
        shared.step()


def test_weights_and_pages_are_cut_not_copied():
    shared = engine(2, 4)
    embed = next(w for w in shared.runner.program.weights if w.shape == (CONFIG.vocab_size, 32))
    assert embed.addressable_shards[0].data.size * 2 == embed.size
    assert isinstance(embed.sharding, NamedSharding) and embed.sharding.spec[0] == HEADS
    run(shared)
    for pages in jax.tree.leaves(shared.runner.buffers.cache):
        assert pages.addressable_shards[0].data.size * 8 == pages.size
    tokens = shared.runner.buffers.tokens
    assert tokens.sharding.spec[0] == DATA
    assert tokens.addressable_shards[0].data.shape[0] * 4 == tokens.shape[0]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match=r"is 16 devices, and JAX sees 8 \(cpu\)"):
        make_mesh(tensor_parallel=2, data_parallel=8)
    with pytest.raises(ValueError, match="tensor_parallel=0: expected at least 1"):
        make_mesh(tensor_parallel=0, data_parallel=1)
    config = dataclasses.replace(CONFIG, num_q_heads=4)
    limits = {"page_size": 3, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 2}
    with pytest.raises(
        ValueError, match=r"4 query heads .* tensor_parallel=4 with data_parallel=2"
    ):
        plan_engine(config, dtype="float32", kv_dtype="float32", tensor_parallel=8, **limits)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_plan_counts_repeated_heads(tensor):
    limits = {"page_size": 4, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 2}
    options = {"dtype": "float32", "kv_dtype": "float32", **limits}
    alone, pages = plan_engine(CONFIG, **options)
    plan, shared_pages = plan_engine(CONFIG, tensor_parallel=tensor, **options)
    heads = max(1, tensor / CONFIG.num_kv_heads)
    for group in range(len(plan.groups)):
        assert plan.page_bytes(group) == heads * alone.page_bytes(group)
    assert shared_pages == pages
    memory = 2 * sum(count * alone.page_bytes(group) for group, count in enumerate(pages))
    _, held = plan_engine(CONFIG, tensor_parallel=tensor, memory=memory, **options)
    assert sum(count * plan.page_bytes(group) for group, count in enumerate(held)) <= memory
