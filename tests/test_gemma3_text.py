"""Text-only models against transformers' outputs (see tests/data/gemma3_text).

The prompts are longer than four windows, the texts that follow them longer than three.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.sampling import SamplingParams
from tests import tiny_model, tiny_text
from tests.engine_checks import assert_empty, assert_sound
from tests.single_sequence import SingleSequence
from tests.tiny_checkpoints import write_folder
from tests.tiny_text import CONFIGS, DATA
from tests.tiny_vision import VOCAB, greedy_count

TOLERANCE = 2e-5


@cache
def load(name: str) -> Gemma3:
    """The model, from a folder as transformers saves it."""
    tensors, config_json = tiny_text.hf_tensors(name), CONFIGS[name]
    with TemporaryDirectory() as folder:
        path = write_folder(Path(folder), tensors, config_json=config_json, dtype=np.float32)
        config, weights = load_weights(path, dtype="float32")
    return Gemma3(config, {name: jnp.asarray(array) for name, array in weights.items()})


def reference(name: str) -> tuple[list[int], list[int], np.ndarray]:
    """A prompt, the greedy text after it, and the logits after every token of both."""
    prompt, arrays = tiny_text.prompt(name).tolist(), np.load(DATA / f"{name}.npz")
    greedy, logits = arrays["greedy_ids"].tolist(), arrays["logits"]
    window = CONFIGS[name]["sliding_window"]
    assert len(prompt) > 4 * window and len(greedy) == greedy_count(CONFIGS[name]) > 3 * window
    assert len(set(greedy)) > 10  # the context decides
    assert logits.shape == (len(prompt) + len(greedy), VOCAB)
    return prompt, greedy, logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_through_pages(name):
    prompt, greedy, logits = reference(name)
    sequence = SingleSequence(load(name), page_size=3, max_len=64, paddings=(7,))
    assert len(sequence.plan.groups) == 2
    hidden = sequence.prefill(np.array(prompt + greedy), 7)
    np.testing.assert_allclose(sequence.logits(hidden), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("hybrid", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine(name, hybrid):
    """Two texts at once, in chunks, one of them from its middle: the whole distribution."""
    prompt, greedy, logits = reference(name)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    engine = tiny_model.engine(load(name), max_num_batched_tokens=7, hybrid_kv_cache=hybrid)
    assert len(engine.plan.groups) == 1 + hybrid
    engine.runner.buckets = engine.buckets[-1:]
    sequences = []
    for given in (0, 5):
        params = SamplingParams(
            max_tokens=len(greedy) - given, temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB
        )
        tokens = prompt + greedy[:given]
        sequences.append(engine.add(tokens, params, seed=0, stream=tiny_model.PlainText()))
    while engine.has_work:
        engine.step()
        assert_sound(engine)
    assert_empty(engine)
    for sequence in sequences:
        assert sequence.error is None
        assert sequence.tokens == prompt + greedy
        reports = sequence.prompt_logprobs + sequence.logprobs
        for report, row in zip(reports, expected[:-1], strict=True):
            logprobs = [report[token].logprob for token in range(VOCAB)]
            np.testing.assert_allclose(logprobs, row, rtol=0, atol=TOLERANCE)
