"""The engine on a tiny float32 model, against the same model without a cache."""

import logging
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.plan import group_layers
from jaxattn.cache.state import init_cache
from jaxattn.engine.engine import token_buckets
from jaxattn.engine.sampler import Asked, ParamTable, draw
from jaxattn.models.gemma3.model import layer_specs
from jaxattn.registry import UnsupportedAttentionError, select
from jaxattn.sampling import SamplingParams
from tests import tiny_model
from tests.tiny_model import VOCAB, WINDOW, PlainText

MAX_LEN = 64
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SCORED = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=3)
TINY = tiny_model.model()


@cache
def shared_engine(hybrid=True):
    """Compiled once; every test leaves it empty."""
    return tiny_model.engine(
        TINY, max_num_batched_tokens=3 * WINDOW, max_num_seqs=4, hybrid_kv_cache=hybrid
    )


@pytest.fixture
def engine():
    engine = shared_engine()
    yield engine
    assert_empty(engine)


def assert_empty(engine):
    assert not engine.has_work
    [scheduler] = engine.schedulers
    scheduler.allocator.check()
    assert scheduler.allocator.free_pages == tuple(pages - 1 for pages in engine.num_pages)
    assert len(scheduler._slots) == scheduler.max_num_seqs


def random_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def add(engine, prompt, params=GREEDY, seed=0):
    return engine.add(prompt, params, seed=seed, stream=PlainText())


def run(engine, prompts, params=GREEDY):
    """Everything at once."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    sequences = [add(engine, *each) for each in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    return sequences


@cache
def full_forward():
    """`tokens[MAX_LEN] -> logits[MAX_LEN, vocab]` in one shot, on the dense oracle."""
    specs = layer_specs(TINY.config, page_size=MAX_LEN, kv_dtype="float32")
    plan = group_layers(specs, hybrid=False, max_len=MAX_LEN)

    @jax.jit
    def forward(token_ids):
        batch = RaggedBatch(
            kv_lens=jnp.array([MAX_LEN], jnp.int32),
            cu_q_lens=jnp.array([0, MAX_LEN], jnp.int32),
            distribution=jnp.array([0, 1, 1], jnp.int32),
            tables=(PageTable(jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)),),
        )
        hidden, _ = TINY(
            token_ids, init_cache(plan, (2,)), plan=plan, batch=batch, backend="reference"
        )
        return TINY.logits(hidden)

    return forward


def oracle_logits(tokens):
    """Row i is what follows tokens[: i + 1]; padding comes after and is not seen."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(full_forward()(padded))[: len(tokens)]


def oracle_logprobs(tokens):
    return np.asarray(jax.nn.log_softmax(oracle_logits(tokens), axis=-1))


def assert_greedy(sequence):
    """Every new token is the oracle's best."""
    best = oracle_logits(sequence.tokens).argmax(axis=1)
    assert sequence.new_tokens == best[sequence.num_prompt - 1 : -1].tolist()


def test_a_batch_equals_one_at_a_time_and_the_oracle(engine):
    prompts = random_prompts([1, 2, 7, 8, 9, 17, 30, 50, 5])
    together = run(engine, prompts)
    for prompt, each in zip(prompts, together, strict=True):
        assert each.new_tokens == run(engine, [prompt])[0].new_tokens
        assert_greedy(each)
        assert len(each.new_tokens) == 12 and each.finish_reason == "length"
    assert len({tuple(each.new_tokens) for each in together}) == len(prompts)


def test_prompts_that_come_later(engine):
    """Decode and prefill in one step, in every mixture."""
    sequences = []
    for prompt in random_prompts([3, 20, 11, 33, 1, 9], seed=1):
        sequences.append(add(engine, prompt))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    for each in sequences:
        assert_greedy(each)


@pytest.mark.parametrize("chunk", range(1, 3 * WINDOW + 1))
def test_chunks_of_every_size(engine, chunk, monkeypatch):
    prompt = random_prompts([3 * WINDOW + 2], seed=2)[0]
    monkeypatch.setattr(engine.schedulers[0], "max_num_batched_tokens", chunk)
    each = run(engine, [prompt], SCORED)[0]
    assert_greedy(each)
    expected = oracle_logprobs(prompt)[np.arange(len(prompt) - 1), prompt[1:]]
    reports = zip(each.prompt_logprobs, prompt[1:], strict=True)
    ours = [report[token].logprob for report, token in reports]
    np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_hybrid_cache_on_and_off_are_bit_equal(engine):
    uniform = shared_engine(hybrid=False)
    assert (len(engine.plan.groups), len(uniform.plan.groups)) == (2, 1)
    prompts = random_prompts([1, 9, 25, 40, 6], seed=3)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=20, prompt_logprobs=20)
    for ours, theirs in zip(
        run(engine, prompts, params), run(uniform, prompts, params), strict=True
    ):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == theirs.logprobs  # floats, exactly
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert_empty(uniform)


def test_few_shapes_are_compiled(engine):
    rng = np.random.default_rng(4)
    run(engine, random_prompts(rng.integers(1, 60, 50), seed=4), SamplingParams(max_tokens=3))
    assert engine.buckets == token_buckets(4, 3 * WINDOW) == (1, 2, 4, 8, 16, 24)
    assert engine.runner.num_compiled() <= len(engine.buckets)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_nothing_is_compiled_after_precompiling(max_num_seqs):
    engine = tiny_model.engine(TINY, max_num_seqs=max_num_seqs, max_num_batched_tokens=2)
    done = []
    with jax.log_compiles(), CompileLog() as compiled:
        engine.precompile(done.append)
    assert len(compiled.names) >= 2
    assert done == [1, 2] and engine.shapes == ((1, 1), (2, max_num_seqs))
    params = SamplingParams(max_tokens=3, temperature=1, top_p=0.5, logprobs=1, prompt_logprobs=1)
    with jax.log_compiles(), CompileLog() as compiled:
        run(engine, random_prompts([1, 4, 2]), params)
    assert compiled.names == []
    assert_empty(engine)


class CompileLog(logging.Handler):
    """Names of what jax compiles meanwhile."""

    def __enter__(self):
        self.names = []
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("jax").removeHandler(self)

    def emit(self, record):
        if record.getMessage().startswith("Compiling"):
            self.names.append(record.getMessage()[:80])


def test_buckets():
    assert token_buckets(1, 1) == (1,)
    assert token_buckets(8, 512) == (1, 2, 8, 16, 32, 64, 128, 256, 512)
    assert token_buckets(4, 100) == (1, 2, 4, 8, 16, 32, 64, 100)
    assert token_buckets(4, 4) == (1, 2, 4)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_prompt_logprobs(engine, length):
    prompt, other = random_prompts([length, 13], seed=5)
    each, *_ = run(engine, [prompt, other, other], [SCORED, GREEDY, SCORED])
    exact = oracle_logprobs(prompt)
    assert len(each.prompt_logprobs) == length - 1
    for row, (report, token) in enumerate(zip(each.prompt_logprobs, prompt[1:], strict=True)):
        assert next(iter(report)) == token
        best = np.argsort(-exact[row])[:3].tolist()
        assert set(report) == {token, *best}
        assert report[token].rank == 1 + (exact[row] > exact[row, token]).sum()
        for likely, entry in report.items():
            assert entry.logprob == pytest.approx(exact[row, likely], abs=2e-4)
        assert [report[likely].rank for likely in best] == [1, 2, 3]


def test_logprobs_are_the_models_whatever_is_drawn(engine):
    params = SamplingParams(
        *(), max_tokens=6, temperature=3.0, top_k=40, presence_penalty=1.0, logprobs=2, seed=3
    )
    prompt = random_prompts([10], seed=6)[0]
    plain, each = run(engine, [prompt, prompt], [GREEDY, params])
    assert plain.logprobs == [] and plain.output().logprobs is None
    exact = oracle_logprobs(each.tokens)[len(prompt) - 1 :]
    assert len(each.logprobs) == 6
    for row, (report, token) in enumerate(zip(each.logprobs, each.new_tokens, strict=True)):
        assert next(iter(report)) == token
        assert report[token].logprob == pytest.approx(exact[row, token], abs=2e-4)
        assert report[token].rank == 1 + (exact[row] > exact[row, token]).sum()
        assert report[token].decoded_token == str(token)
        assert {*np.argsort(-exact[row])[:2].tolist(), token} == set(report)


def test_zero_logprobs_report_the_token_alone(engine):
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=0)
    each = run(engine, [[5, 6, 7]], params)[0]
    assert [list(report) for report in each.logprobs] == [[token] for token in each.new_tokens]
    assert [list(report) for report in each.prompt_logprobs] == [[6], [7]]


def test_penalties_count_prompt_and_new_tokens(engine):
    """Against the oracle's logits and a plain loop."""
    params = SamplingParams(
        max_tokens=12, temperature=0, repetition_penalty=1.5, frequency_penalty=0.5
    )
    prompt = random_prompts([9], seed=7)[0]
    each, plain = run(engine, [prompt, prompt], [params, GREEDY])
    logits = oracle_logits(each.tokens)
    for step, token in enumerate(each.new_tokens):
        row = logits[len(prompt) - 1 + step].copy()
        new = each.new_tokens[:step]
        for seen in {*prompt, *new}:
            row[seen] = row[seen] / 1.5 if row[seen] > 0 else row[seen] * 1.5
            row[seen] -= 0.5 * new.count(seen)
        assert token == row.argmax()
    assert each.new_tokens != plain.new_tokens


def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.95)
    prompts = random_prompts([12, 3, 28, 7], seed=8)
    alone = add(engine, prompts[0], params, seed=11)
    while engine.has_work:
        engine.step()
    others = [add(engine, prompt, params, seed=11) for prompt in prompts[1:]]
    again = add(engine, prompts[0], params, seed=11)
    different = add(engine, prompts[0], params, seed=12)
    while engine.has_work:
        engine.step()
    assert alone.new_tokens == again.new_tokens != different.new_tokens
    assert all(each.new_tokens != alone.new_tokens for each in others)


def test_draws_are_those_of_seed_sample_and_step(engine):
    """The sampler on the oracle's logits: step i draws the i-th new token."""
    params, prompt = SamplingParams(max_tokens=10, temperature=1.0), random_prompts([12], seed=8)[0]
    for index in (0, 3):
        each = engine.add(prompt, params, seed=11, stream=PlainText(), index=index)
        while engine.has_work:
            engine.step()
        table = ParamTable(1)
        table.set(0, params, seed=11, sample=index)
        rows = table.rows(np.zeros(10, np.int32), np.arange(10, dtype=np.int32))
        logits = jnp.asarray(oracle_logits(each.tokens)[len(prompt) - 1 : -1])
        asked = Asked.by([params], samples=True)
        assert each.new_tokens == jax.jit(draw)(logits, rows, asked).tolist()


def test_the_model_length_ends_a_continuation(engine):
    prompt = random_prompts([MAX_LEN - 3], seed=9)[0]
    each = run(engine, [prompt], SamplingParams(max_tokens=50, temperature=0))[0]
    assert (len(each.tokens), each.finish_reason) == (MAX_LEN, "length")
    longest = run(engine, [[*prompt, 5, 6]], GREEDY)[0]
    assert (len(longest.new_tokens), longest.finish_reason) == (1, "length")


def test_the_engines_eos_ends_a_continuation(engine, monkeypatch):
    prompt = random_prompts([10], seed=10)[0]
    tokens = run(engine, [prompt])[0].new_tokens
    monkeypatch.setattr(engine, "eos_ids", (tokens[4],))
    each = run(engine, [prompt])[0]
    where = tokens.index(tokens[4])
    assert (each.new_tokens, each.finish_reason) == (tokens[: where + 1], "stop")
    ignoring = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert run(engine, [prompt], ignoring)[0].new_tokens == tokens


WHERE = ["runner._step", "runner.load", "schedulers[0].settle", "_fetch"]


def break_engine(engine, where, error, patch):
    """The next call of `where` fails, with the buffers gone."""

    def fail(*args, **kwargs):
        patch.undo()
        jax.tree.map(lambda pages: pages.delete(), engine.runner.buffers)  # as donation does
        raise error("in the middle")

    owner, name = {
        "runner._step": (engine.runner, "_step"),
        "runner.load": (engine.runner, "load"),
        "schedulers[0].settle": (engine.schedulers[0], "settle"),
        "_fetch": (engine, "_fetch"),
    }[where]
    patch.setattr(owner, name, fail)


@pytest.mark.parametrize("where", WHERE)
def test_a_failing_step_ends_its_requests_and_no_others(engine, where, monkeypatch):
    prompts = random_prompts([6, 30, 40, 2, 9, 11, 5], seed=11)
    expected = [each.new_tokens for each in run(engine, prompts)]
    sequences = [add(engine, prompt) for prompt in prompts]
    engine.step()
    engine.step()
    break_engine(engine, where, ValueError, monkeypatch)
    news = [sequence for _ in range(100) for sequence in engine.step()]
    failed = [each for each in sequences if each.finish_reason == "error"]
    assert 0 < len(failed) < len(sequences)
    for each in failed:
        assert each in news and str(each.error) == "in the middle"
    for each, tokens in zip(sequences, expected, strict=True):
        assert each in failed or each.new_tokens == tokens
    assert [each.new_tokens for each in run(engine, prompts)] == expected


class BrokenText(PlainText):
    """Fails at the token after `good` ones, and at the end."""

    def __init__(self, good):
        self.good = good

    def step(self, token_id):
        self.good -= 1
        if self.good < 0:
            raise ValueError("no text")
        return super().step(token_id)

    def finish(self):
        raise ValueError("no text")


@pytest.mark.parametrize("good", [5, 12])
def test_a_text_that_fails_ends_its_own_request_alone(engine, good):
    prompts = random_prompts([6, 9, 11], seed=13)
    expected = [each.new_tokens for each in run(engine, prompts)]
    streams = [PlainText(), BrokenText(good), PlainText()]
    sequences = [
        engine.add(prompt, GREEDY, seed=0, stream=stream)
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    news = []
    while engine.has_work:
        news += [each for each in engine.step() if each.finish_reason is not None]
    assert sorted(each.id for each in news) == [each.id for each in sequences]  # once each
    assert [each.finish_reason for each in sequences] == ["length", "error", "length"]
    assert [sequences[n].new_tokens for n in (0, 2)] == [expected[0], expected[2]]
    assert str(sequences[1].error) == "no text"


def test_precompiling_waits_for_requests_to_end(engine):
    add(engine, [5, 6, 7])
    with pytest.raises(RuntimeError, match="precompile before there are requests"):
        engine.precompile()
    engine.clear()


def test_an_interrupt_in_the_clean_up_is_made_good(engine, monkeypatch):
    prompts = random_prompts([6, 30, 9], seed=14)
    expected = [each.new_tokens for each in run(engine, prompts)]
    for where in ("reset", "_empty"):
        for prompt in prompts:
            add(engine, prompt)
        engine.step()
        with monkeypatch.context() as patch, monkeypatch.context() as second:
            break_engine(engine, "_fetch", KeyboardInterrupt, patch)

            def again(*args):
                second.undo()
                raise KeyboardInterrupt("again")

            second.setattr(engine.runner, where, again)
            with pytest.raises(KeyboardInterrupt, match="again"):
                for _ in range(100):
                    engine.step()
        engine.clear()
        assert_empty(engine)
        assert [each.new_tokens for each in run(engine, prompts)] == expected


def test_a_lost_cache_is_gone_before_the_next_one_is_made(engine, monkeypatch):
    old = jax.tree.leaves(engine.runner.buffers)
    make = engine.runner._empty
    seen = []
    monkeypatch.setattr(
        engine.runner, "_empty", lambda: seen.append([b.is_deleted() for b in old]) or make()
    )
    engine.runner.reset()
    assert seen == [[True] * len(old)]
    engine.schedulers[0].restart(engine._new_allocator())  # the prefix tree of the old one is gone


@pytest.mark.parametrize("where", WHERE)
def test_an_interrupted_step_drops_everything(engine, where, monkeypatch):
    prompts = random_prompts([6, 30, 40, 2, 9, 11, 5], seed=11)
    sequences = [add(engine, prompt) for prompt in prompts]
    engine.step()
    break_engine(engine, where, KeyboardInterrupt, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        for _ in range(100):
            engine.step()
    assert_empty(engine)
    assert {each.finish_reason for each in sequences} <= {"abort", "error"}
    for each in run(engine, prompts):
        assert_greedy(each)


def test_a_step_without_work_does_nothing(engine, monkeypatch):
    monkeypatch.setattr(engine.runner, "dispatch", None)
    assert engine.step() == []


def test_abort_leaves_the_others_alone(engine):
    prompts = random_prompts([6, 30, 40, 2, 9, 5], seed=12)
    sequences = [add(engine, prompt) for prompt in prompts]
    engine.step()
    engine.abort(sequences[1::2])
    while engine.has_work:
        engine.step()
    engine.abort(sequences)
    for each in sequences[0::2]:
        assert_greedy(each)
    assert all(each.finish_reason == "abort" for each in sequences[1::2])


def test_abort_lets_those_in_who_wait(engine):
    """The step that is settled next has no news, and somebody waits for its slots."""
    prompts = random_prompts([6, 30, 40, 2, 9, 5], seed=12)
    sequences = [add(engine, prompt) for prompt in prompts]
    for _ in range(8):
        engine.step()
    engine.abort(sequences[:4])
    assert engine.step() == []
    while engine.has_work:
        engine.step()
    for each in sequences[4:]:
        assert_greedy(each)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB, -1], rf"token ids \[{VOCAB}, -1\] are outside 0 to {VOCAB - 1}"),
        ([1] * MAX_LEN, "the prompt has 64 tokens; max_model_len=64 leaves room for 63"),
    ],
)
def test_wrong_prompts(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        add(engine, prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"max_model_len": tiny_model.MAX_POSITION + 1},
            ValueError,
            "max_model_len=4097: the model's positions end at 4096",
        ),
        ({"max_model_len": 0}, ValueError, "max_model_len=0: expected at least 1"),
        ({"page_size": 0}, ValueError, "page_size=0: expected at least 1"),
        ({"page_size": 2.0}, TypeError, "page_size=2.0: expected a Python int"),
        ({"page_size": 1024}, UnsupportedAttentionError, "page_size=1024: supported: 1 to 512"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs=0"),
        ({"max_num_batched_tokens": True}, TypeError, "max_num_batched_tokens=True"),
        ({"max_num_batched_tokens": 3}, ValueError, "is less than max_num_seqs=4"),
        ({"kv_dtype": "int4"}, ValueError, "dtype='int4': a cache stores one of"),
        ({"kv_dtype": "float16"}, UnsupportedAttentionError, "cache dtype=float16"),
        ({"backend": "cuda"}, ValueError, "backend='cuda': the backends are"),
        (
            {"backend": "pallas_tpu"},
            UnsupportedAttentionError,
            r"pallas_tpu: on cpu \(cpu\): supported: platform tpu",
        ),
        (
            {"backend": "pallas_gpu"},
            UnsupportedAttentionError,
            r"pallas_gpu: on cpu \(cpu\): supported: platform gpu",
        ),
    ],
)
def test_wrong_options_are_refused_at_construction(options, error, message, monkeypatch):
    monkeypatch.setattr("jaxattn.engine.engine.Runner", None)  # before anything is allocated
    with pytest.raises(error, match=message):
        tiny_model.engine(TINY, **options)


@pytest.mark.parametrize("hybrid", [True, False])
def test_what_is_checked_at_construction_is_what_is_asked_while_tracing(hybrid, monkeypatch):
    """The largest step asks for exactly the needs that `plan_engine` checked."""
    planned, asked = [], []

    def keep(needs):
        return lambda need, backend: needs.append(need) or select(need, backend)

    monkeypatch.setattr("jaxattn.engine.engine.select", keep(planned))
    monkeypatch.setattr("jaxattn.attention.select", keep(asked))
    tiny = tiny_model.engine(TINY, hybrid_kv_cache=hybrid)
    tiny.add([65] * 30, SamplingParams(max_tokens=1), seed=0, stream=PlainText())
    tiny.step()
    assert planned == asked


def test_the_pools_are_of_the_planned_bytes(engine):
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.buffers.cache))
    sizes = enumerate(engine.num_pages)
    assert arrays == sum(count * engine.plan.page_bytes(group) for group, count in sizes)
