"""The vision tower in an engine: images become embeddings just before the step they are in."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float, Int32

from jaxattn.engine.images import Image, PlacedImage
from jaxattn.engine.replicas import on_replicas
from jaxattn.engine.scheduler import Scheduled
from jaxattn.models.gemma3.vision import VisionTower
from jaxattn.sharding import DATA

_NUM_KEPT = 16  # images: their embeddings take 44 MB for Gemma 3 27B in bfloat16


class ImageEncoder:
    """Runs the tower on one image of every replica at a time, so that it is compiled once.

    Keeps the embeddings of the last images: the continuations of one prompt, and requests that
    find most of an image in the cache, need them again.

    Args:
        tower: its weights lie where the text model's do.
        mesh: of the replicas, see `Runner`.
        sharding: cuts the first axis over the replicas.
    """

    def __init__(
        self,
        tower: VisionTower,
        *,
        mesh: Mesh | None,
        sharding: Sharding,
    ):
        self._num_replicas = mesh.shape[DATA] if mesh else 1
        self._sharding = sharding
        size = tower.config.image_size
        self._pixels_shape = (size, size, 3)
        self._num_tokens = tower.config.tokens_per_image
        graph, state = nnx.split(tower)
        self._weights, tree = jax.tree.flatten(state)

        def encode(weights: list[Array], pixels: Array) -> Float[Array, "tokens embed"]:
            return nnx.merge(graph, jax.tree.unflatten(tree, weights))(pixels)[0]

        self.encode = jax.jit(on_replicas(encode, mesh, cut=(False, True)), out_shardings=sharding)
        self._place = jax.jit(
            on_replicas(_place, mesh, cut=(True, True, True)),
            donate_argnums=0,
            out_shardings=sharding,
        )
        self._blank = jax.jit(
            lambda like, num_tokens: jnp.zeros((num_tokens, like.shape[1]), like.dtype),
            static_argnums=1,
            out_shardings=sharding,
        )
        self._kept: OrderedDict[tuple[int, int], Array] = OrderedDict()

    def embeddings(
        self, shares: Sequence[Sequence[Scheduled]], num_tokens: int
    ) -> Float[Array, "tokens embed"]:
        """Embeddings of a step's images at their flat tokens, zeros elsewhere, of all replicas.

        `shares[replica]`; `num_tokens` are the flat tokens of each replica, padding included.
        """
        used = [
            (replica, rows, each.image)
            for replica, step in enumerate(shares)
            for each, rows in images_of(step)
        ]
        self._encode_missing([(replica, image) for replica, _, image in used])
        [some, *_] = self._kept.values()
        embeddings = self._blank(some, self._num_replicas * num_tokens)
        for replica, rows, image in used:
            self._kept.move_to_end((replica, image.token_id))
            encoded = self._kept[replica, image.token_id]
            places = np.full((self._num_replicas, self._num_tokens), num_tokens, np.int32)
            places[replica, self._num_tokens - len(rows) :] = rows
            embeddings = self._put(encoded, embeddings, places)
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return embeddings

    def warm_up(self, num_tokens: int) -> Float[Array, "tokens embed"]:
        """Compile what a step of `num_tokens` with images needs. Returns its embeddings, zeros."""
        encoded = self._run([None] * self._num_replicas)
        blank = self._blank(encoded, self._num_replicas * num_tokens)
        nowhere = np.full((self._num_replicas, self._num_tokens), num_tokens, np.int32)
        return self._put(encoded, blank, nowhere)

    def arguments(self) -> tuple[list, jax.ShapeDtypeStruct]:
        """The shapes that `encode` takes: of the tower's weights, and an image of every replica."""
        shape = (self._num_replicas, *self._pixels_shape)
        pixels = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=self._sharding)
        return self._weights, pixels

    def forget(self) -> None:
        """Drop what is kept: it may be the result of something that failed."""
        self._kept.clear()

    def _encode_missing(self, wanted: list[tuple[int, Image]]) -> None:
        queues: list[dict[int, Image]] = [{} for _ in range(self._num_replicas)]
        for replica, image in wanted:
            if (replica, image.token_id) not in self._kept:
                queues[replica][image.token_id] = image
        for images in zip_longest(*(queue.values() for queue in queues)):
            encoded = self._run(images)
            for replica, image in enumerate(images):
                if image is not None:
                    self._kept[replica, image.token_id] = encoded

    def _run(self, images: Sequence[Image | None]) -> Float[Array, "tokens embed"]:
        """Embeddings of an image of every replica, one after the other; of None something."""
        blank = np.zeros(self._pixels_shape, np.uint8)
        pixels = np.stack([blank if image is None else image.pixels for image in images])
        return self.encode(self._weights, jax.device_put(pixels, self._sharding))

    def _put(
        self, encoded: Array, embeddings: Array, places: Int32[np.ndarray, "replicas tokens"]
    ) -> Array:
        places = jax.device_put(places.reshape(-1), self._sharding)
        return self._place(embeddings, encoded, places)


def images_of(step: Sequence[Scheduled]) -> Iterator[tuple[PlacedImage, range]]:
    """The images of a replica's step, and their flat tokens: fewer if the cache has some."""
    flat = 0
    for share in step:
        for each in share.images:
            begin = max(each.start, share.start) - share.start
            yield each, range(flat + begin, flat + each.end - share.start)
        flat += share.num_tokens


def _place(
    embeddings: Float[Array, "tokens embed"],
    encoded: Float[Array, "image_tokens embed"],
    places: Int32[Array, "image_tokens"],
) -> Float[Array, "tokens embed"]:
    return embeddings.at[places].set(encoded, mode="drop")
