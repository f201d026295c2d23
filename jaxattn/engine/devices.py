"""The devices of an engine: its mesh, where the weights go, and how much memory is left."""

from collections.abc import Callable, Sequence
from os import PathLike

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import Array

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.packaged import cache_folder
from jaxattn.models.gemma3.sharding import shared_config, weight_specs
from jaxattn.models.gemma3.weights import weight_table
from jaxattn.sharding import DATA, HEADS
from jaxattn.spec import check_positive_int

CACHE_SHARE = 0.9  # of what is left beside the weights; the rest is for a step's temporaries


def make_mesh(*, tensor_parallel: int, data_parallel: int) -> Mesh | None:
    """A mesh of `data_parallel` times `tensor_parallel` devices; None for one device alone."""
    check_positive_int("tensor_parallel", tensor_parallel)
    check_positive_int("data_parallel", data_parallel)
    wanted, devices = tensor_parallel * data_parallel, jax.devices()
    if wanted == 1:
        return None
    if wanted > len(devices):
        raise ValueError(
            f"{tensor_parallel=} times {data_parallel=} is {wanted} devices, and JAX sees "
            f"{len(devices)} ({devices[0].platform})"
        )
    return mesh_of(devices[:wanted], tensor_parallel=tensor_parallel)


def mesh_of(devices: Sequence[jax.Device], *, tensor_parallel: int) -> Mesh:
    """An engine's mesh of these devices, `tensor_parallel` neighbours to each replica."""
    grid = np.array(devices).reshape(-1, tensor_parallel)
    return Mesh(grid, (DATA, HEADS), axis_types=(AxisType.Auto, AxisType.Auto))


def sharding_of(mesh: Mesh | None, device: jax.Device, spec: PartitionSpec) -> Sharding:
    """On the mesh, or the one device without one: always said, or a step would compile for each."""
    return SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, spec)


def weight_placer(config: Gemma3Config, mesh: Mesh | None) -> Callable[[str, np.ndarray], Array]:
    """`place(name, weight)`: a weight of a checkpoint, each part of it on its devices.

    Returns once the weight is there, so that the caller may drop it. Where heads are repeated
    (`shared_config`), each device gets the rows of its own: the whole is never copied. On one CPU
    device nothing is, if the array is aligned.
    """
    if mesh is None:
        alone = SingleDeviceSharding(jax.devices()[0])
        return lambda name, weight: jax.block_until_ready(jax.device_put(weight, alone))
    shared = shared_config(config, mesh.shape[HEADS])
    # With the scales of quantised weights, whether or not there are any.
    specs, table = weight_specs(shared, "int8"), weight_table(shared, "int8")
    repeats = shared.num_kv_heads // config.num_kv_heads

    def place(name: str, weight: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, specs[name])
        if repeats == 1 or "kv_heads" not in table[name].axes:
            return jax.block_until_ready(jax.device_put(weight, sharding))

        def own(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start = index[0].start or 0  # the device's one head begins here
            head = start // config.head_dim // repeats
            return weight[head * config.head_dim : (head + 1) * config.head_dim]

        shape = table[name].shape
        return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, own))

    return place


def place_weights(
    config: Gemma3Config, weights: dict[str, np.ndarray], mesh: Mesh | None
) -> dict[str, Array]:
    """All weights on their devices; `weights` is emptied meanwhile, to hold nothing twice."""
    place = weight_placer(config, mesh)
    return {name: place(name, weights.pop(name)) for name in list(weights)}


def free_memory(mesh: Mesh | None) -> int | None:
    """Bytes that one replica's devices have for a cache; None if they do not tell (CPU)."""
    devices = mesh.devices[0] if mesh else jax.devices()[:1]
    stats = [device.memory_stats() for device in devices]
    if not all(each and "bytes_limit" in each for each in stats):
        return None
    left = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    return int(CACHE_SHARE * left) * len(devices)


def use_compilation_cache(folder: str | PathLike[str] | None) -> None:
    """Keep compiled steps for later processes, where JAX was not told another place."""
    if folder is None and jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder or cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
