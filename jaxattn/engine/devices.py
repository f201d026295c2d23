"""The devices of an engine: its mesh, where the weights go, and how much memory is left."""

from os import PathLike

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array

from jaxattn.engine.replicas import DATA, HEADS
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.packaged import cache_folder
from jaxattn.models.gemma3.sharding import weight_specs
from jaxattn.models.gemma3.weights import quantization_of
from jaxattn.spec import check_positive_int

_CACHE_SHARE = 0.9  # of what is left beside the weights; the rest is for a step's temporaries


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
    grid = np.array(devices[:wanted]).reshape(data_parallel, tensor_parallel)
    return Mesh(grid, (DATA, HEADS), axis_types=(AxisType.Auto, AxisType.Auto))


def place_weights(
    config: Gemma3Config, weights: dict[str, np.ndarray], mesh: Mesh | None
) -> dict[str, Array]:
    """The weights on their devices; `weights` is emptied meanwhile, to hold nothing twice."""
    size = mesh.shape[HEADS] if mesh else 1
    specs = weight_specs(config, HEADS, size, quantization_of(weights))
    alone = SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.device_put(weights.pop(name), NamedSharding(mesh, specs[name]) if mesh else alone)
        for name in list(weights)
    }


def free_memory(mesh: Mesh | None) -> int | None:
    """Bytes that one replica's devices have for a cache; None if they do not tell (CPU)."""
    devices = mesh.devices[0] if mesh else jax.devices()[:1]
    stats = [device.memory_stats() for device in devices]
    if not all(each and "bytes_limit" in each for each in stats):
        return None
    left = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    return int(_CACHE_SHARE * left) * len(devices)


def use_compilation_cache(folder: str | PathLike[str] | None) -> None:
    """Keep compiled steps for later processes, where JAX was not told another place."""
    if folder is None and jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder or cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
