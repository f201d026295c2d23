"""The step of an engine, jitted for its devices, and the shapes that it takes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding
from jaxtyping import Array

from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.plan import CachePlan
from jaxattn.cache.state import CacheState, cache_shapes
from jaxattn.engine.devices import sharding_of
from jaxattn.engine.replicas import on_replicas
from jaxattn.engine.sampler import Asked, ParamTable
from jaxattn.engine.step import Buffers, StepInputs, StepOutputs, make_step
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.registry import Backend, Target
from jaxattn.sharding import DATA, HEADS, pages_sharding

_UNCUT = PartitionSpec(None)


class Program:
    """What is compiled. The model's weights may be shapes: nothing is allocated here.

    `mesh`: None, or one with the axes `data` (replicas) and `heads`; `device`: the one to use
    without a mesh, by default the first; `target`: what attention is compiled for, by default the
    device in use. `weights` are the model's, flat. `step(weights, buffers,
    inputs, asked, image_embeddings, num_tokens=...)` computes `num_tokens` flat tokens on every
    replica; `image_embeddings` is None in a step without images.
    """

    def __init__(
        self,
        model: Gemma3,
        plan: CachePlan,
        *,
        num_pages: Sequence[int],
        widths: Sequence[int],
        max_num_seqs: int,
        backend: str | Backend | None,
        mesh: Mesh | None = None,
        device: jax.Device | None = None,
        target: Target | None = None,
    ):
        self.plan = plan
        self._embed_dim, self._dtype = model.config.embed_dim, jnp.dtype(model.dtype)
        self.num_pages = tuple(num_pages)
        self.widths = tuple(widths)
        self.max_num_seqs = max_num_seqs
        self.mesh = mesh
        self.num_replicas = mesh.shape[DATA] if mesh else 1
        self._device = mesh.devices.flat[0] if mesh else device or jax.devices()[0]
        attention: dict[str, Any] = {"backend": backend, "target": target}
        if mesh:  # also for one device a replica: a kernel is never cut automatically
            attention["heads_axis"] = HEADS
        self.weights, step = make_step(model, plan, **attention)
        self.step = jax.jit(
            partial(self._on_replicas, step),
            static_argnames="num_tokens",
            donate_argnames="buffers",
            out_shardings=self._out_shardings(),
            compiler_options=_compiler_options(self._device.platform),
        )

    def _on_replicas(
        self,
        step: Callable,
        weights: list[Array],
        buffers: Buffers,
        inputs: StepInputs,
        asked: Asked,
        image_embeddings: Array | None,
        *,
        num_tokens: int,
    ) -> tuple[Buffers, StepOutputs]:
        """The step on every replica's part of the buffers and inputs."""
        own = on_replicas(
            partial(step, num_tokens=num_tokens), self.mesh, cut=(False, True, True, False, True)
        )
        return own(weights, buffers, inputs, asked, image_embeddings)

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """On the mesh, or the one device."""
        return sharding_of(self.mesh, self._device, spec)

    def _of_replicas(self, leaf: Any, spec: PartitionSpec = _UNCUT) -> Any:
        """One replica's array as the shape of all replicas' arrays, one after the other."""
        shape = (self.num_replicas * leaf.shape[0], *leaf.shape[1:])
        sharding = self.sharding(PartitionSpec(DATA, *spec[1:]))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def buffer_shapes(self) -> Buffers:
        """Shapes, dtypes and shardings of the buffers of all replicas."""
        pages = {
            name: jax.tree.map(self._of_replicas, leaves, pages_sharding(leaves, HEADS))
            for name, leaves in cache_shapes(self.plan, self.num_pages).pages.items()
        }
        tokens = jax.ShapeDtypeStruct((self.max_num_seqs, self.plan.max_len), jnp.int32)
        return Buffers(CacheState(pages), self._of_replicas(tokens))

    def input_shapes(self, num_tokens: int, *, images: bool = False) -> StepInputs:
        """Shapes, dtypes and shardings of what the host says of a step of `num_tokens` tokens."""
        rows = min(num_tokens, self.max_num_seqs)

        def integers(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        tables = tuple(PageTable(integers(rows, width), integers(rows)) for width in self.widths)
        inputs = StepInputs(
            batch=RaggedBatch(integers(rows), integers(rows + 1), integers(3), tables),
            slots=integers(rows),
            num_prompt=integers(rows),
            samples=jax.ShapeDtypeStruct((rows,), jnp.bool_),  # type: ignore[arg-type]
            params=ParamTable(rows).rows(np.arange(rows), np.zeros(rows, np.int32)),
            image_spans=integers(num_tokens, 2) if images else None,
        )
        return jax.tree.map(self._of_replicas, inputs)

    def arguments(
        self, num_tokens: int, *, images: bool = False
    ) -> tuple[list, Buffers, StepInputs, Asked, Any]:
        """Shapes of all that a step takes, the same whatever is asked for."""
        asked = Asked.by([], samples=True)
        embeddings = jax.ShapeDtypeStruct((num_tokens, self._embed_dim), self._dtype)
        whole = self.sharding(PartitionSpec())
        return (
            self.weights,
            self.buffer_shapes(),
            self.input_shapes(num_tokens, images=images),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype, sharding=whole), asked),
            self._of_replicas(embeddings) if images else None,
        )

    def _out_shardings(self) -> Any:
        """Buffers stay where they are: a step returns what the next one was compiled for."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.buffer_shapes()), None


def _compiler_options(platform: str) -> dict[str, int]:
    """512-bit vectors on CPU: with XLA's 256 the head of a single row takes 1.6 times as long."""
    return {"xla_cpu_prefer_vector_width": 512} if platform == "cpu" else {}
