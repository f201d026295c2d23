"""Compile for a TPU that is not here: libtpu's ahead-of-time compiler, in a process per target.

`compile_cases("v6e", cases)` starts one child process, which compiles the cases one after the
other and survives their errors; when the compiler itself dies, that case gets the blame and a new
child goes on with the rest. Needs libtpu (Linux on x86-64), no TPU.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.bundles import Kernel, parse_kernel

ROOT = Path(__file__).parent.parent
ERROR_CHARS = 600


@dataclass(frozen=True)
class Topology:
    """What libtpu calls a slice with 8 devices of one kind."""

    name: str
    accelerator_type: str


TOPOLOGIES = {
    "v5e": Topology("v5e:2x4", "v5litepod-8"),
    "v5p": Topology("v5p:2x2x2", "v5p-16"),
    "v6e": Topology("v6e:2x4", "v6e-8"),
    "tpu7x": Topology("tpu7x:2x2x1", "tpu7x-8"),
}

# "memory": sizes only. "schedule": the kernels' bundles too. "scopes": the same with named scopes
# marked, which costs the kernel some bundles; for finding out what a scope covers.
Read = Literal["memory", "schedule", "scopes"]


class LibtpuMissingError(RuntimeError):
    """libtpu, the TPU compiler, is not installed."""


@dataclass(frozen=True)
class Case:
    """What to compile: `builder` is "package.module:function", called in the child.

    `function(target, devices, **options)` gets the `jaxattn.Target` and the topology's 8 devices
    and returns a jitted function and its arguments as `jax.ShapeDtypeStruct`s. Arguments without
    a sharding are placed on the first device; all or none have a `NamedSharding`. `options` are
    JSON values.
    """

    name: str
    builder: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One case's result; sizes in bytes, per device. `error` is "" or says why it failed."""

    case: str
    target: str
    error: str = ""
    error_type: str = ""  # the exception's name; "died" when the child did
    seconds: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0  # of the output, what lies in donated arguments
    temp_bytes: int = 0
    code_bytes: int = 0
    flops: float = 0.0  # by XLA's count, Pallas kernels by their own cost estimate
    bytes_accessed: float = 0.0
    kernels: tuple[Kernel, ...] = ()

    def kernel(self, name: str) -> Kernel:
        """The only kernel of this name (XLA adds ".1"); ValueError if there is none or several."""
        if self.error:
            raise ValueError(f"{self.case!r} did not compile for {self.target}: {self.error}")
        pattern = re.compile(re.escape(name) + r"(\.\d+)*")
        found = [kernel for kernel in self.kernels if pattern.fullmatch(kernel.name)]
        if len(found) != 1:
            names = [kernel.name for kernel in self.kernels]
            raise ValueError(f"{self.case!r}: {len(found)} kernels named {name!r} in {names}")
        return found[0]


def compile_cases(
    target: str, cases: Sequence[Case], *, read: Read = "memory", seconds_per_case: float = 600
) -> list[Compiled]:
    """Compile every case for a target ("v5e", "v5p", "v6e", "tpu7x"), in the given order.

    Several calls may run at the same time. A case that takes longer than `seconds_per_case` is
    stopped and reported as an error.

    Raises:
        ValueError: no such target, or two cases of one name.
        LibtpuMissingError: libtpu is not installed.
        RuntimeError: the child could not start, with its words.
    """
    if target not in TOPOLOGIES:
        raise ValueError(f"{target=}: the targets are {', '.join(TOPOLOGIES)}")
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases have the same name: {sorted(names)}")
    if importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissingError(
            "libtpu is not installed, so nothing can be compiled for TPU: install the development "
            "dependencies (`uv sync`) or `pip install libtpu`, on Linux x86-64"
        )
    results: list[Compiled] = []
    while len(results) < len(cases):
        rest = cases[len(results) :]
        with tempfile.TemporaryDirectory() as folder:
            results += _run_child(target, rest, read, seconds_per_case, Path(folder))
    return results


def _run_child(
    target: str, cases: Sequence[Case], read: Read, seconds_per_case: float, folder: Path
) -> list[Compiled]:
    """Results of the cases that one child got through, the one that stopped it included."""
    dump = folder / "dump"
    dump.mkdir()
    task = {"target": target, "folder": str(folder), "cases": [asdict(case) for case in cases]}
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, "-m", "benchmarks.tpu_aot", str(folder / "task.json")]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=_environment(target, read, dump), stdout=log, stderr=log
        )
        reason = _wait(child, folder / "results", seconds_per_case)
    lines = _finished(folder / "results")
    results = []
    for index, line in enumerate(lines):
        kernels = () if line["error"] else _read_kernels(folder / f"case{index}")
        results.append(Compiled(**line, target=target, kernels=kernels))
    if len(results) < len(cases):
        words = (folder / "log").read_text(errors="replace").splitlines()
        words = [line for line in words if line.strip() and not re.match(r"[WIE]\d{4} ", line)]
        error = f"{reason}; its last words: " + _shortened(" / ".join(words[-12:]), last=True)
        if not (folder / "started").exists():
            raise RuntimeError(f"the compiler for {target} did not start: {error}")
        name = cases[len(results)].name
        results.append(Compiled(case=name, target=target, error=error, error_type="died"))
    return results


def _environment(target: str, read: Read, dump: Path) -> dict[str, str]:
    flags = []
    if read != "memory":
        flags += [
            f"--xla_jf_dump_to={dump}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo-static).*",
        ]
    if read == "scopes":
        flags.append("--xla_enable_custom_call_region_trace=true")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache prints no schedule
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "TPU_ACCELERATOR_TYPE": TOPOLOGIES[target].accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # else a second process aborts on a lock file
        "LIBTPU_INIT_ARGS": " ".join(flags),
    }


def _finished(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines(keepends=True)]


def _wait(child: subprocess.Popen, results: Path, seconds_per_case: float) -> str:
    """Wait for the child as long as it gets on; why it ended."""
    done = -1
    while (now := len(_finished(results))) > done:
        done = now
        try:
            return f"the compiler's process ended with status {child.wait(seconds_per_case)}"
        except subprocess.TimeoutExpired:
            continue
    child.kill()
    child.wait()
    return f"no end after {seconds_per_case:g} s"


def _read_kernels(folder: Path) -> tuple[Kernel, ...]:
    """The Mosaic kernels among the compiler's files of one case."""
    kernels = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"(\d+-([^<].*))-\d+-final_bundles\.txt", path.name)
        if match is None or match[2].endswith("-schedule-analysis") or match[2] == "TLP":
            continue
        text = path.read_text(errors="replace")
        if not re.search(r"exit bundle: \S+ = custom-call", text):
            continue  # a fusion of XLA's
        ending = re.compile(re.escape(match[1]) + r"-\d+-final_hlo-static-per-bundle-utilization")
        (utilization,) = (each for each in folder.iterdir() if ending.match(each.name))
        kernels.append(parse_kernel(match[2], text, utilization.read_text()))
    return tuple(kernels)


def _shortened(text: str, *, last: bool = False) -> str:
    text = " ".join(text.split())
    if len(text) <= ERROR_CHARS:
        return text
    return "... " + text[-ERROR_CHARS:] if last else text[:ERROR_CHARS] + " ..."


def _child(task: dict[str, Any]) -> None:
    """Compile the task's cases; one line of JSON each, its schedule's files in a folder each."""
    import jax
    from jax._src.mesh import abstract_device_from
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding

    from jaxattn import Target

    folder, target = Path(task["folder"]), Target.tpu(task["target"])
    name = TOPOLOGIES[task["target"]].name
    devices: Any = topologies.get_topology_desc(name, "tpu").devices
    if devices[0].device_kind != target.device_kind:
        raise RuntimeError(f"{name} has devices of kind {devices[0].device_kind!r}, not {target}")
    # Pallas asks the abstract mesh for the chip where no device is attached.
    one_device = AbstractMesh(
        (1,), ("x",), (AxisType.Auto,), abstract_device=abstract_device_from(devices[0])
    )
    (folder / "started").touch()

    def place(argument: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = argument.sharding or SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)

    def compile_one(builder: str, options: dict[str, Any]) -> dict[str, Any]:
        module, _, name = builder.partition(":")
        build: Callable = getattr(importlib.import_module(module), name)
        function, arguments = build(target, devices, **options)
        shardings = [argument.sharding for argument in jax.tree.leaves(arguments)]
        meshes = [each.mesh.abstract_mesh for each in shardings if isinstance(each, NamedSharding)]
        with jax.sharding.use_abstract_mesh(meshes[0] if meshes else one_device):
            lowered = function.lower(*jax.tree.map(place, arguments))
        compiled = lowered.compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        return {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
            "flops": cost.get("flops", 0.0),
            "bytes_accessed": cost.get("bytes accessed", 0.0),
        }

    for index, case in enumerate(task["cases"]):
        line = {"case": case["name"], "error": ""}
        start = time.perf_counter()
        try:
            line |= compile_one(case["builder"], case["options"])
        except Exception as error:
            line |= {
                "error": _shortened(str(error)) or "no words",
                "error_type": type(error).__name__,
            }
        line["seconds"] = time.perf_counter() - start
        (folder / f"case{index}").mkdir()
        for path in (folder / "dump").iterdir():
            path.rename(folder / f"case{index}" / path.name)
        with (folder / "results").open("a") as results:
            results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    _child(json.loads(Path(sys.argv[1]).read_text()))
