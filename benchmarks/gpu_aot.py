"""Compile for an NVIDIA GPU that is not here: XLA's ahead-of-time compiler, in a process a case.

`compile_cases("h100", cases)` needs no GPU and no driver, but what benchmarks/gpu_requirements.txt
lists, beside jax. A compiler that dies takes its case with it and no other.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.sass import Kernel, read_kernels
from benchmarks.tpu_aot import Case
from jaxattn.kernels.pallas.gpu_shape import SMEM_BYTES, multiprocessors
from jaxattn.registry import GPUS as KNOWN_GPUS

ROOT = Path(__file__).parent.parent
ERROR_CHARS = 600
CUSTOM_CALL = "kCustomCall"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the compiler asks of a chip, from its data sheet."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    smem_bytes: int  # that a block of threads may use
    l2_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: int

    def description(self) -> str:
        """As the text of XLA's GpuTargetConfigProto."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              name: "{self.name}"
              cuda_compute_capability {{
                major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
              }}
              core_count: {self.multiprocessors}
              fpus_per_core: 128
              clock_rate_ghz: 1.7
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.smem_bytes}
              shared_memory_per_core: {self.smem_bytes + 1024}
              l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.hbm_bytes}
              memory_bandwidth: {self.hbm_bytes_per_s}
              driver_version: "13.0.0" runtime_version: "13.0.0"
            }}
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 10 }}
        """


def _gpu(target: str, **sizes: int) -> Gpu:
    """What the project says of a chip, and what it has no use for."""
    name, compute_capability = KNOWN_GPUS[target]
    return Gpu(
        name=name,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors(name),
        smem_bytes=SMEM_BYTES,
        **sizes,
    )


GPUS = {
    "h100": _gpu("h100", l2_bytes=50 * 2**20, hbm_bytes=80 * 10**9, hbm_bytes_per_s=3_352 * 10**9),
}


class GpuCompilerMissingError(RuntimeError):
    """jax's CUDA plugin or the assembler is not installed."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One case's result; sizes in bytes. `error` is "" or says why it failed."""

    case: str
    target: str
    error: str = ""
    seconds: float = 0.0
    argument_bytes: int = 0
    alias_bytes: int = 0  # of the output, what lies in donated arguments
    temp_bytes: int = 0
    peak_bytes: int = 0
    # What the program launches, in order: "kCustomKernel" is XLA's own, CUSTOM_CALL Mosaic's. A
    # conditional is one launch, and not looked into.
    launches: tuple[str, ...] = ()
    ours: dict[str, int] = field(default_factory=dict)  # launches of Mosaic kernels by name
    copied_bytes: int = 0  # of the largest array that is copied as it is
    kernels: tuple[Kernel, ...] = ()


def compile_cases(
    target: str, cases: Sequence[Case], *, seconds_per_case: float = 600
) -> Iterator[Compiled]:
    """Compile every case for a target ("h100"), one after the other, in the given order.

    A case's builder is called as `function(target, devices, **options)` with the `jaxattn.Target`
    and a tuple of one device, where that device is JAX's default one.

    Raises:
        ValueError: no such target, or two cases of one name.
        GpuCompilerMissingError: something is not installed.
    """
    if target not in GPUS:
        raise ValueError(f"{target=}: the targets are {', '.join(GPUS)}")
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases have the same name: {sorted(names)}")
    missing = [name for name in ("jax_plugins.xla_cuda13", "nvidia.cu13") if not _exists(name)]
    if missing or not _tools():
        raise GpuCompilerMissingError(
            f"nothing can be compiled for GPU: {', '.join(missing) or 'ptxas or nvdisasm'} is "
            "missing; run this with `uv run --isolated --no-dev --with-requirements "
            "benchmarks/gpu_requirements.txt`, on Linux x86-64"
        )
    return (_run_child(target, case, seconds_per_case) for case in cases)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _tools() -> bool:
    import nvidia

    return all(
        any(any(Path(root).glob(f"*/bin/{tool}")) for root in nvidia.__path__)
        for tool in ("ptxas", "nvdisasm")
    )


def _run_child(target: str, case: Case, seconds: float) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        (dump / "task.json").write_text(json.dumps({"target": target, **asdict(case)}))
        command = [sys.executable, "-m", "benchmarks.gpu_aot", folder]
        start = time.perf_counter()
        try:
            child = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | _environment(dump),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Compiled(case=case.name, target=target, error=f"no end after {seconds:g} s")
        taken = time.perf_counter() - start
        if not (dump / "result.json").exists():
            error = f"status {child.returncode}: {_telling(child.stderr)}"
            return Compiled(case=case.name, target=target, error=error, seconds=taken)
        result = json.loads((dump / "result.json").read_text())
        if "error" not in result:
            result |= {"kernels": read_kernels(dump), "launches": _launches(dump)}
        return Compiled(case=case.name, target=target, seconds=taken, **result)


def _environment(dump: Path) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",  # else the plugin looks for a GPU's libraries
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache leaves no files
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text=false",
    }


def _telling(log: str) -> str:
    """The lines of a child's log that say most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"ptxas|LLVM ERROR|[\w.]*Error: |error: ", line)]
    return " / ".join(errors[-1:] or lines[-4:])[-ERROR_CHARS:]


def _launches(dump: Path) -> tuple[str, ...]:
    """Of the largest program that was compiled."""
    texts = [path.read_text() for path in dump.glob("*.thunk_sequence.txt")]
    return tuple(max((re.findall(r"^\d+: (k\w+)", text, re.M) for text in texts), key=len))


def _largest_copy(program: str) -> int:
    """Bytes of the largest array that a compiled program copies, outside of conditionals."""
    entry = program.partition("\nENTRY ")[2]
    copies = re.findall(r" = \(?([a-z]+)(\d*)\w*\[([\d,]*)\]\S* copy(?:-start)?\(", entry)
    return max((int(bits or 8) // 8 * prod(_sizes(dims)) for _, bits, dims in copies), default=0)


def _sizes(dims: str) -> list[int]:
    return [int(size) for size in dims.split(",") if size]


def _child(folder: Path) -> None:
    """Compile the folder's task, with all the files that it leaves there."""
    import jax
    from jax.experimental import topologies

    from jaxattn import Target

    task = json.loads((folder / "task.json").read_text())
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[task["target"]].description(), topology="1x1x1"
    )
    device = topology.devices[0]

    def place(argument: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = argument.sharding or jax.sharding.SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)

    module, _, name = task["builder"].partition(":")
    build = getattr(importlib.import_module(module), name)
    try:
        with jax.default_device(device):  # Pallas asks it for the chip
            function, arguments, *static = build(Target.current(), (device,), **task["options"])
            compiled = function.lower(*jax.tree.map(place, arguments), **dict(*static)).compile()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]
        (folder / "result.json").write_text(json.dumps({"error": words}))
        return
    memory: Any = compiled.memory_analysis()
    program = compiled.as_text()
    calls = re.findall(r'custom-call\(.*op_name="[^"]*/(\w+)/mpmd_map', program)
    result = {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "copied_bytes": _largest_copy(program),
        "ours": Counter(calls),
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
