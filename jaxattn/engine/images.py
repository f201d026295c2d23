"""Images inside a prompt: which tokens are theirs, and the ids by which the host knows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True, eq=False)
class Image:
    """A picture as the vision tower takes it. Every token of it has the id `token_id`.

    That is the size of the vocabulary plus the SHA-256 of the pixels: no word's, the same for the
    same picture in any request, and another for another picture. So requests share the pages of a
    picture as they share those of a text, and nobody has to remember which pictures there were.
    """

    pixels: UInt8[np.ndarray, "height width 3"]
    token_id: int

    @classmethod
    def of(cls, pixels: UInt8[np.ndarray, "height width 3"], *, vocab_size: int) -> "Image":
        """The image of some pixels; their shape is the model's."""
        digest = sha256(np.ascontiguousarray(pixels).data).digest()
        return cls(pixels, vocab_size + int.from_bytes(digest))


class PlacedImage(NamedTuple):
    """An image in a prompt: its tokens are `[start, end)`. Two images never touch."""

    start: int
    end: int
    image: Image


def public_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids for the world, where every image's is the first after the vocabulary."""
    return [min(token, vocab_size) for token in token_ids]


def whole_images(images: Sequence[PlacedImage], start: int, count: int) -> int:
    """How many of the `count` tokens from `start` on end inside no image.

    An image's tokens see each other in both directions: what a step computes of it must reach its
    end. It may begin inside, where the keys and values before it are in the cache.
    """
    end = start + count
    for each in images:
        if each.start < end < each.end:
            return max(each.start - start, 0)
    return count
