"""The schedule of RPA v3, tpu-inference's kernel, at its default block sizes: measured constants.

Compiled with jax 0.12.0.1 and libtpu 0.0.50.1: 256 tokens, 64 sequences, page size 32, a page
table for 4096 tokens, bfloat16.
"""

from dataclasses import dataclass

NAME = "RPA v3 (tpu-inference 0.32.0)"


@dataclass(frozen=True)
class Loop:
    """Bundles, and spills + fills, of one pass of a loop over `tokens` KV tokens."""

    tokens: int
    bundles: int
    spills: int


@dataclass(frozen=True)
class Peer:
    """The kernel's cost of one unit of work, and the spills + fills of its loop."""

    bundles: float
    spills: int


# Decoding is a loop over KV blocks; the mixed kernel's loop has 128 queries.
_WINDOWED = {
    ("v5e", "27B"): Loop(2048, 7587, 3134),
    ("v5e", "27B on 4 chips"): Loop(4096, 5485, 1620),
    ("v5e", "4B"): Loop(4096, 8698, 2697),
    ("v5e", "1B"): Loop(4096, 3881, 771),
    ("v6e", "27B"): Loop(2048, 7188, 5688),
    ("v6e", "27B on 4 chips"): Loop(4096, 4710, 3521),
    ("v6e", "4B"): Loop(4096, 7703, 5665),
    ("v6e", "1B"): Loop(4096, 2855, 1289),
    ("tpu7x", "27B"): Loop(2048, 7292, 5628),
    ("tpu7x", "27B on 4 chips"): Loop(4096, 4709, 3479),
    ("tpu7x", "4B"): Loop(4096, 7361, 4097),
    ("tpu7x", "1B"): Loop(4096, 3142, 656),
}
_GLOBAL = {
    ("v5e", "27B"): Loop(2048, 7608, 3136),
    ("v5e", "4B"): Loop(4096, 8655, 2688),
    ("v5e", "1B"): Loop(4096, 3877, 767),
    ("v6e", "27B"): Loop(2048, 7170, 5688),
    ("v6e", "4B"): Loop(4096, 7633, 5659),
    ("v6e", "1B"): Loop(4096, 2825, 1245),
    ("tpu7x", "27B"): Loop(2048, 7293, 5627),
    ("tpu7x", "4B"): Loop(4096, 7374, 4094),
    ("tpu7x", "1B"): Loop(4096, 3119, 646),
}
_PREFILL = {
    ("v5e", "27B"): Loop(512, 10912, 13050),
    ("v5e", "27B on 4 chips"): Loop(512, 2998, 3257),
    ("v5e", "4B"): Loop(512, 4438, 4928),
    ("v5e", "1B"): Loop(512, 2608, 2488),
    ("v6e", "27B"): Loop(512, 7600, 15696),
    ("v6e", "27B on 4 chips"): Loop(512, 2187, 3688),
    ("v6e", "4B"): Loop(512, 2481, 4425),
    ("v6e", "1B"): Loop(512, 1403, 1432),
    ("tpu7x", "27B"): Loop(512, 7277, 17077),
    ("tpu7x", "27B on 4 chips"): Loop(512, 2136, 3956),
    ("tpu7x", "4B"): Loop(512, 2491, 4540),
    ("tpu7x", "1B"): Loop(512, 1497, 1357),
}
_WINDOW = {"27B": 1024, "27B on 4 chips": 1024, "4B": 1024, "1B": 512}


def rpa_v3(target: str, layer: str, work: str) -> Peer | None:
    """Its cost in the units of our table; None where it was not measured.

    A windowed decode step computes whole blocks, and at a random long length its window touches
    `1 + W / block` of them on average.
    """
    measured = {"windowed decode": _WINDOWED, "global decode": _GLOBAL, "prefill": _PREFILL}[work]
    loop = measured.get((target, layer))
    if loop is None:
        return None
    passes = 1.0  # of prefill, whose unit is a pass
    if work == "windowed decode":
        passes = 1 + _WINDOW[layer] / loop.tokens
    elif work == "global decode":
        passes = 1 / loop.tokens
    return Peer(loop.bundles * passes, loop.spills)
