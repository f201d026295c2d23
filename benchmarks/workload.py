"""The requests of the engine's benchmarks, from fixed seeds. Needs NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_REQUESTS = 200
PROMPT_TOKENS = (16, 1024)
NEW_TOKENS = (8, 256)
_ORDINARY = (1000, 200_000)  # token ids


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to generate, whatever they are."""

    prompt: list[int]
    new: int


def mixed(repeat: int, count: int = NUM_REQUESTS) -> list[Request]:
    """Lengths log-uniform, the same in every repeat; prompts of random tokens, new in each."""
    lengths = np.random.default_rng(0)
    prompts = _log_uniform(lengths, PROMPT_TOKENS, NUM_REQUESTS)[:count]
    new = _log_uniform(lengths, NEW_TOKENS, NUM_REQUESTS)[:count]
    tokens = np.random.default_rng(1 + repeat)
    return [
        Request(random_tokens(tokens, int(prompt)), int(most))
        for prompt, most in zip(prompts, new, strict=True)
    ]


def shared_prefix(repeat: int, *, count: int, prefix: int, new: int) -> list[Request]:
    """Prompts that begin alike, and go on for 16 to 128 tokens."""
    tokens = np.random.default_rng(1000 + repeat)
    beginning = random_tokens(tokens, prefix)
    own = [int(size) for size in np.random.default_rng(0).integers(16, 129, count)]
    return [Request(beginning + random_tokens(tokens, size), new) for size in own]


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Ids of ordinary tokens."""
    return rng.integers(*_ORDINARY, count).tolist()


def _log_uniform(rng: np.random.Generator, limits: tuple[int, int], count: int) -> np.ndarray:
    low, high = np.log(limits)
    return np.round(np.exp(rng.uniform(low, high, count))).astype(int)
