"""What SamplingParams accepts, and how it says no."""

import math
from dataclasses import fields

import pytest

from jaxattn.sampling import MAX_LOGPROBS, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens=0: expected at least 1"),
        ("max_tokens", -3, "max_tokens=-3: expected at least 1"),
        ("temperature", -0.1, r"temperature=-0.1: expected at least 0"),
        ("temperature", math.inf, "temperature=inf"),
        ("temperature", math.nan, "temperature=nan"),
        ("top_k", -1, "top_k=-1: expected at least 0"),
        ("top_k", 2**31, "top_k=2147483648"),
        ("top_p", 0.0, "top_p=0.0: expected above 0 and at most 1"),
        ("top_p", 1.01, "top_p=1.01: expected above 0 and at most 1"),
        ("top_p", math.nan, "top_p=nan"),
        ("min_p", -0.01, "min_p=-0.01: expected at least 0 and at most 1"),
        ("min_p", 1.5, "min_p=1.5"),
        ("seed", -1, f"seed=-1: expected at least 0 and at most {2**32 - 1}"),
        ("seed", 2**32, f"seed={2**32}"),
        ("n", 0, "n=0: expected at least 1"),
        ("logprobs", -1, "logprobs=-1: expected at least 0 and at most 64"),
        ("logprobs", MAX_LOGPROBS + 1, "logprobs=65"),
        ("prompt_logprobs", MAX_LOGPROBS + 1, "prompt_logprobs=65"),
        ("repetition_penalty", 0, "repetition_penalty=0: expected at least 0.001"),
        ("repetition_penalty", 1e-38, "repetition_penalty=1e-38: expected at least 0.001"),
        ("repetition_penalty", 1001, "repetition_penalty=1001: expected .* at most 1000"),
        ("repetition_penalty", math.inf, "repetition_penalty=inf"),
        ("presence_penalty", 2.1, "presence_penalty=2.1: expected at least -2 and at most 2"),
        ("presence_penalty", -2.1, "presence_penalty=-2.1"),
        ("frequency_penalty", 2.1, "frequency_penalty=2.1"),
        ("frequency_penalty", -2.1, "frequency_penalty=-2.1"),
        ("stop", "", "stop='': expected non-empty strings"),
        ("stop", ["a", ""], "stop=.*expected non-empty strings"),
        ("stop", [1], "stop=.*expected non-empty strings"),
        ("stop_token_ids", [-1], "stop_token_ids=.*expected ids of at least 0"),
        ("stop_token_ids", [True], "stop_token_ids=.*expected ids of at least 0"),
        ("stop_token_ids", [1.0], "stop_token_ids=.*expected ids of at least 0"),
    ],
)
def test_wrong_values(name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", ["1", True, None, 1.5, [1]])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "n"])
def test_whole_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name}=.*expected an int"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", ["1", True, 1.0])
@pytest.mark.parametrize("name", ["seed", "logprobs", "prompt_logprobs"])
def test_optional_whole_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name}=.*expected an int"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", ["1", True, None])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
def test_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name}=.*expected a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", 5, "stop=5: expected a list"),
        ("stop_token_ids", 5, "stop_token_ids=5: expected a list"),
        ("ignore_eos", 1, "ignore_eos=1: expected True or False"),
        ("ignore_eos", None, "ignore_eos=None"),
    ],
)
def test_wrong_types(name, value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: value})


def test_unknown_keyword():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(16)


@pytest.mark.parametrize(
    "extreme",
    [
        {"max_tokens": 1, "top_k": 0, "top_p": 1e-30, "min_p": 1.0, "seed": 0, "n": 1},
        {"top_p": 1, "min_p": 0, "seed": 2**32 - 1, "logprobs": 0, "prompt_logprobs": 0},
        {"logprobs": 64, "prompt_logprobs": 64, "repetition_penalty": 1e-3, "temperature": 0},
        {"presence_penalty": -2, "frequency_penalty": 2, "top_k": 10**9},
        {"stop": (), "stop_token_ids": ()},
    ],
)
def test_limits_are_allowed(extreme):
    params = SamplingParams(**extreme)
    assert all(getattr(params, name) == value for name, value in extreme.items())


def test_stop_strings():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


def test_has_penalties():
    assert not SamplingParams(temperature=2.0, top_k=3).has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).has_penalties


def test_names_are_those_of_the_field():
    assert {field.name for field in fields(SamplingParams)} == {
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
        *("stop_token_ids", "n", "logprobs", "prompt_logprobs", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "ignore_eos"),
    }
