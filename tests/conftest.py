import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import itertools

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_compiled():
    """Drop compiled functions now and then.

    Each keeps dozens of memory mappings; at Linux's limit of 65,530 a process is killed by the
    next compilation.
    """
    yield
    if next(_tests_run) % 100 == 0:
        jax.clear_caches()
