"""The engine on tiny multimodal models: against transformers, and against the whole model at once.

The pictures of "narrow_window" have 16 tokens, its windows 5.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from jaxattn.engine.devices import make_mesh, place_weights
from jaxattn.engine.image_encoder import _NUM_KEPT
from jaxattn.engine.images import whole_images
from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.weights import expected_shapes
from jaxattn.registry import CAPABILITIES, UnsupportedAttentionError
from jaxattn.sampling import SamplingParams
from tests import tiny_model, tiny_vision, vision_models
from tests.engine_checks import assert_empty, assert_sound, evict, narrow
from tests.image_prompts import (
    MAX_LEN,
    add,
    assert_greedy,
    oracle_logits,
    reference_prompt,
    tokens_of,
)

NAME = "narrow_window"
MODEL = vision_models.load(NAME)
TOKENS = MODEL.config.vision.tokens_per_image
STEP = 2 * TOKENS + 5


def make_engine(name=NAME, model=None, **options):
    """One size of step, so that little is compiled."""
    options = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP} | options
    engine = tiny_model.engine(model or vision_models.load(name), **options)
    engine.runner.buckets = engine.buckets[-1:]
    return engine


@cache
def shared_engine(hybrid=True):
    engine = make_engine(hybrid_kv_cache=hybrid)
    if hybrid:
        engine.runner.buckets = (4, *engine.buckets[-1:])
    return engine


@pytest.fixture
def engine():
    engine = shared_engine()
    narrow(engine, chunk=STEP, memory=20, prefix_reuse=True)
    yield engine
    assert_empty(engine)


def run(engine, prompts, params=None):
    sequences = [add(engine, tokens_of(MODEL, each), params) for each in prompts]
    while engine.has_work:
        engine.step()
        assert_sound(engine)
    return sequences


@pytest.mark.parametrize(
    "name", [NAME, "global_only", pytest.param("wide_window", marks=pytest.mark.slow)]
)
def test_scores_and_greedy_tokens_are_those_of_transformers(name):
    """In chunks, by the engine: every word's log-probability, the two likeliest's, and new words.

    All is compiled before, the encoder included.
    """
    tokens = tiny_vision.CONFIGS[name]["mm_tokens_per_image"]
    engine = make_engine(name, max_num_batched_tokens=tokens + 3)
    done = []
    engine.precompile(done.append)
    assert done == [1, 2]
    encoder = engine.runner._encoder
    functions = (engine.runner._step, encoder.encode, encoder._place, encoder._blank)
    compiled = [each._cache_size() for each in functions]
    for images in (2, 1):
        ids, placed = reference_prompt(name, images)
        reference = np.load(tiny_vision.DATA / f"{name}_{images}.npz")
        greedy = reference["greedy_ids"].tolist()
        window = tiny_vision.CONFIGS[name]["text_config"]["sliding_window"]
        assert len(greedy) > 3 * window and len(set(greedy)) > 1
        params = SamplingParams(
            max_tokens=len(greedy), temperature=0, logprobs=2, prompt_logprobs=2
        )
        sequence = add(engine, (ids, placed), params)
        while engine.has_work:
            engine.step()
        assert sequence.new_tokens == greedy
        expected = np.asarray(jax.nn.log_softmax(reference["logits"], axis=-1))
        reports = sequence.prompt_logprobs + sequence.logprobs
        words = 0
        for position, report in enumerate(reports, start=1):
            token = sequence.tokens[position]
            if token >= tiny_vision.VOCAB:
                assert report is None
                continue
            words += 1
            assert token in report and len(report) >= 2
            for each, entry in report.items():
                assert entry.logprob == pytest.approx(expected[position - 1, each], abs=2e-5)
        assert words == 5 + 5 * images + len(greedy)
    assert compiled == [each._cache_size() for each in functions]


PROMPTS = [
    [5, 6, 7, "a", 8, 9],
    [5, 6, 7, "a", 8, 9, "b", 10],
    ["b", 5],
    [5, "a", 6, "a", 7, 8, 9, 10, 11, "c", 12],
    [20, 21, 22, 23, 24],
    [5, 6, 7, "d", 8, 9],
    [30],
]


@pytest.mark.parametrize("chunk", [TOKENS, TOKENS + 1, TOKENS + 5, STEP])
def test_chunks_that_hold_an_image(engine, chunk):
    narrow(engine, chunk=chunk, memory=20, prefix_reuse=False)
    for prompt in PROMPTS[1:4]:
        [sequence] = run(engine, [prompt])
        assert_greedy(NAME, sequence)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_batches_in_every_state_of_the_cache(hybrid, reuse):
    engine = shared_engine(hybrid)
    narrow(engine, chunk=TOKENS + 3, memory=3, prefix_reuse=reuse)
    draw = np.random.default_rng(0)
    for _ in range(3):
        order = [PROMPTS[place] for place in draw.permutation(len(PROMPTS))]
        for sequence in run(engine, order):
            assert_greedy(NAME, sequence)
        for group in range(len(engine.plan.groups)):
            allocator = engine.schedulers[0].allocator
            evict(allocator, group, int(draw.integers(allocator.free_pages[group])))
    assert (engine.stats().prefix_hit_tokens > 0) or not reuse
    assert_empty(engine)


@pytest.mark.parametrize(("tensor", "data"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)])
def test_shared_among_devices(tensor, data, tmp_path):
    mesh = make_mesh(tensor_parallel=tensor, data_parallel=data)
    folder = vision_models.write(tmp_path, NAME)
    config, weights = load_weights(folder, dtype="float32")
    engine = make_engine(model=Gemma3(config, place_weights(config, weights, mesh)), mesh=mesh)
    for prompts in (PROMPTS, PROMPTS[::-1], [["a", 5], ["a", 6], [7], ["e", 5], ["f", 5]]):
        for sequence in run(engine, prompts):
            assert_greedy(NAME, sequence)
    assert engine.stats().prefix_hit_tokens > 0
    assert engine.runner.num_compiled() <= engine.runner.num_shapes


def test_preempted(engine):
    narrow(engine, chunk=TOKENS + 3, memory=1, prefix_reuse=True)
    before = engine.stats().preemptions
    params = SamplingParams(max_tokens=30, temperature=0)
    sequences = run(engine, PROMPTS[:4], params)
    assert engine.stats().preemptions > before
    for sequence in sequences:
        assert len(sequence.new_tokens) == min(30, MAX_LEN - sequence.num_prompt)
        assert_greedy(NAME, sequence)


def test_only_the_same_picture_is_found_again(engine):
    text = [3, 4, 5]  # a page
    first, same, other = (
        run(engine, [[*text, name, *range(6, 12)]])[0] for name in ("a", "a", "c")
    )
    assert same.num_cached_tokens == len(text) + TOKENS + 5  # whole pages, less the last token
    assert first.new_tokens == same.new_tokens
    assert other.num_cached_tokens == len(text)
    assert other.new_tokens != first.new_tokens
    assert_greedy(NAME, other)


def test_a_step_may_begin_inside_an_image_that_is_cached(engine):
    """Its first page boundary before the new text is inside."""
    run(engine, [[3, 4, "a", 5, 6]])
    [other] = run(engine, [[3, 4, "a", 7, 8, 9]])
    assert 2 < other.num_cached_tokens == 18 < 2 + TOKENS + 1
    assert_greedy(NAME, other)
    assert not other.num_cached_tokens % engine.plan.groups[0].store.page_size
    engine.runner.reset()  # also what the encoder has kept
    engine.schedulers[0].restart(engine._new_allocator())
    run(engine, [[3, "b", 5, 6]])
    evict(engine.schedulers[0].allocator, 0)
    [again] = run(engine, [[3, "b", 5, 7]])
    assert_greedy(NAME, again)


def test_an_image_is_encoded_once(engine, monkeypatch):
    engine.runner.reset()
    encoder, encoded = engine.runner._encoder, []
    encode = encoder._run
    monkeypatch.setattr(encoder, "_run", lambda images: encoded.extend(images) or encode(images))
    narrow(engine, chunk=STEP, memory=20, prefix_reuse=False)
    run(engine, [["a", 5], ["b", 6], ["a", 7], [8, "a", 9, "b", 10]])
    assert len(encoded) == 2
    run(engine, [[f"{number}", 5] for number in range(_NUM_KEPT)])
    assert len(encoded) == 2 + _NUM_KEPT == 2 + len(encoder._kept)
    run(engine, [["a", 5]])
    assert len(encoded) == 3 + _NUM_KEPT


def test_steps_of_text_are_compiled_without_images(engine):
    run(engine, [[5, 6, 7], ["a", 5, 6, 7]])
    assert {(4, False), (STEP, True)} <= engine.runner._compiled
    assert engine.runner.num_compiled() <= engine.runner.num_shapes == 4
    text = expected_shapes(replace(MODEL.config, vision=None))
    assert len(engine.runner.program.weights) == len(text), "the tower's too"


def test_penalties_do_not_see_images(engine):
    params = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3)
    ids, placed = tokens_of(MODEL, [5, "a", 6])
    sequence = add(engine, (ids, placed), params)
    while engine.has_work:
        engine.step()
    logits = oracle_logits(NAME, sequence.tokens, sequence.images)
    seen = {5, 6}
    for position, token in enumerate(sequence.new_tokens, start=len(ids) - 1):
        row = logits[position].copy()
        for each in seen:
            row[each] = row[each] / 1.3 if row[each] > 0 else row[each] * 1.3
        assert token == row.argmax()
        seen.add(token)


def test_whole_images():
    _, placed = tokens_of(MODEL, [5, "a", 6, "b", 7])  # 1 to 17, 18 to 34
    assert [whole_images(placed, 0, count) for count in (1, 2, 16, 17, 18, 33, 34)] == [
        *(1, 1, 1, 17, 18, 18, 34),
    ]
    assert [whole_images(placed, 1, count) for count in (1, 15, 16, 17)] == [0, 0, 16, 17]
    assert [whole_images(placed, 9, count) for count in (1, 7, 8)] == [0, 0, 8]


def test_what_cannot_be_is_refused(engine, monkeypatch):
    least = TOKENS + 3
    with pytest.raises(
        ValueError, match=rf"max_num_batched_tokens=18 is less than {least}: a step must hold an im"
    ):
        make_engine(max_num_batched_tokens=least - 1)
    with pytest.raises(ValueError, match=r"token ids \[64\] are outside 0 to 63"):
        add(engine, ([5, 64], []))
    ids, placed = tokens_of(MODEL, [5, "a", 6])
    with pytest.raises(ValueError, match="are outside 0 to 63"):
        add(engine, (ids, []))
    text = tiny_model.engine()
    with pytest.raises(ValueError, match="has no vision tower: it takes no images"):
        text.check_prompt(ids, placed)
    monkeypatch.setitem(
        CAPABILITIES, "xla", CAPABILITIES["xla"].__class__(**_without_images(CAPABILITIES["xla"]))
    )
    with pytest.raises(UnsupportedAttentionError, match="xla: image_rule=clamp"):
        make_engine()


def _without_images(row):
    return {name: getattr(row, name) for name in row.__dataclass_fields__} | {
        "image_rules": ("none",)
    }


def test_a_failed_step_leaves_nothing_behind(engine, monkeypatch):
    encoder = engine.runner._encoder

    def fail(*arguments):
        monkeypatch.undo()
        raise RuntimeError("no eyes")

    engine.runner.reset()
    monkeypatch.setattr(encoder, "encode", fail)
    lost = add(engine, tokens_of(MODEL, [5, "a", 6]))
    while engine.has_work:
        engine.step()
    assert lost.finish_reason == "error" and str(lost.error) == "no eyes"
    [sequence] = run(engine, [[5, "a", 6]])
    assert_greedy(NAME, sequence)
