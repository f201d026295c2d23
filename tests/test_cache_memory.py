"""What a cache of Gemma 3 takes: the goals that benchmarks/cache_memory.md reports."""

import pytest

from benchmarks import vllm_rule
from benchmarks.cache_memory import IN_FLIGHT, LENGTHS, STEP_TOKENS, Admission, Sized
from jaxattn.models.gemma3.config import CONFIGS

CASES = [
    pytest.param(config, length, id=f"{name}-{label}")
    for name, config in CONFIGS.items()
    for label, length in LENGTHS.items()
    if label != "16k" and length <= config.max_position
]


@pytest.mark.parametrize("config,length", CASES)
def test_pages_in_use_are_within_a_twentieth_of_the_ideal(config, length):
    sized = Sized(config, length)
    assert sized.ideal(IN_FLIGHT) <= sized.num_bytes(sized.most_pages(1))
    assert sized.num_bytes(sized.most_pages(1)) <= 1.05 * sized.ideal(IN_FLIGHT)
    assert 0.9 * sized.ideal(IN_FLIGHT) <= sized.traced(1) <= 1.05 * sized.ideal(IN_FLIGHT)
    # Several share the tokens in flight: one step's are enough for the ideal of each.
    assert sized.traced(2) <= 1.05 * 2 * sized.ideal(STEP_TOKENS)


@pytest.mark.parametrize("length", [LENGTHS[label] for label in ("8k", "16k", "32k")])
def test_twice_the_requests_that_vllm_reports_run_in_the_same_bytes(length):
    case, stock = Admission(length), vllm_rule.STOCK_TOKENS
    running, preemptions = case.traced(STEP_TOKENS)
    assert running >= case.capacity(STEP_TOKENS) and preemptions == 0
    assert running >= 2 * case.vllm_reported(stock)
    # The same tokens a step, two steps in flight in both.
    assert case.capacity(stock) >= 2 * case.vllm_reported(2 * stock)


@pytest.mark.parametrize(
    "name,windowed,layers",
    [
        ("gemma-3-270m", 5, 3),
        ("gemma-3-1b", 6, 4),
        ("gemma-3-4b", 6, 5),
        ("gemma-3-12b", 5, 8),
        ("gemma-3-27b", 6, 10),
    ],
)
def test_the_peers_groups_have_equal_numbers_of_layers(name, windowed, layers):
    groups = vllm_rule.Groups.of(CONFIGS[name], token_bytes=1)
    assert (groups.full, groups.windowed) == (1, windowed)
    assert groups.block_bytes == layers * vllm_rule.BLOCK


def test_the_peers_charge_by_hand():
    """27B, 16k tokens, 8,192 in flight: 1024 blocks, and six times cdiv(9215, 16) + 1."""
    groups = vllm_rule.Groups.of(CONFIGS["gemma-3-27b"], token_bytes=8192)
    assert groups.charge(16_384, 8192) == 1024 + 6 * 577
    assert groups.held(16_384, 16_383) == 1024 + 6 * (1024 - 960)
    assert groups.concurrency(40 * 10**9, 16_384, 8192) == 30_517 / 4486
