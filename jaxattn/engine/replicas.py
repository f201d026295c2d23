"""Functions of which every replica of a mesh computes its own part."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxattn.sharding import DATA


def on_replicas(function: Callable, mesh: Mesh | None, *, cut: tuple[bool, ...]) -> Callable:
    """A function of whole arrays that calls `function` for every replica's part of them.

    `cut`: of each argument, whether replicas have a part of it (of each array's first axis) or all
    of it. The result is cut.
    """
    if mesh is None or mesh.shape[DATA] == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(DATA) if each else PartitionSpec() for each in cut),
        out_specs=PartitionSpec(DATA),
        axis_names={DATA},
        check_vma=False,  # no output is the same on all replicas
    )
