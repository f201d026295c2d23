"""Compile for a TPU that is not here: libtpu's ahead-of-time compiler, in a process of its own.

`compile_ahead(topology, cases)` starts one child process, which compiles the cases one after the
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
from typing import Any

ERROR_CHARS = 600


@dataclass(frozen=True)
class Topology:
    """Devices of one kind, as libtpu calls them: `name`, such as "v5e:2x4"."""

    name: str
    accelerator_type: str


class LibtpuMissingError(ImportError):
    """libtpu, the TPU compiler, is not installed."""


class CompilerError(RuntimeError):
    """The compiler could not be started, or did not compile what it was given."""


@dataclass(frozen=True)
class Case:
    """What to compile: `builder` is "package.module:function", called in the child.

    `function(target, devices, **options)` gets the `jaxattn.Target` and the topology's devices and
    returns a jitted function, its arguments as `jax.ShapeDtypeStruct`s, and perhaps a dict of
    static keywords. Arguments without a sharding are placed on the first device; all or none have
    a `NamedSharding`. `options` are JSON values.
    """

    name: str
    builder: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One case's result; sizes in bytes, per device. `error` is "" or says why it failed."""

    case: str
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


def check_libtpu() -> None:
    """Raise LibtpuMissingError unless libtpu is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissingError(
            "libtpu is not installed, so nothing can be compiled for TPU: "
            "`pip install 'jaxattn[tpu-plan]'` or `pip install libtpu`, on Linux x86-64"
        )


def compile_ahead(
    topology: Topology,
    cases: Sequence[Case],
    *,
    flags: Sequence[str] = (),
    seconds_per_case: float = 600,
    dump: Path | None = None,
) -> list[Compiled]:
    """Compile every case for a topology, in the given order.

    Several calls may run at the same time. A case that takes longer than `seconds_per_case` is
    stopped and reported as an error. `flags`: libtpu's own. Where they make it write files into
    `dump`, those of each case are moved into `dump/case0`, `dump/case1` and so on.

    Raises:
        ValueError: two cases of one name.
        LibtpuMissingError: libtpu is not installed.
        CompilerError: the child could not start, with its words.
    """
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases have the same name: {sorted(names)}")
    check_libtpu()
    results: list[Compiled] = []
    while len(results) < len(cases):
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "topology": topology.name,
                "folder": folder,
                "dump": None if dump is None else str(dump),
                "first": len(results),
                "cases": [asdict(case) for case in cases[len(results) :]],
            }
            environment = _environment(topology, flags)
            results += _run_child(task, environment, seconds_per_case)
    return results


def _run_child(
    task: dict[str, Any], environment: dict[str, str], seconds_per_case: float
) -> list[Compiled]:
    """Results of the cases that one child got through, the one that stopped it included."""
    folder, cases = Path(task["folder"]), task["cases"]
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, "-m", "jaxattn.engine.ahead", str(folder / "task.json")]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            reason = _wait(child, folder / "results", seconds_per_case)
        finally:  # also Ctrl-C
            child.kill()
            child.wait()
    results = [Compiled(**line) for line in _finished(folder / "results")]
    if len(results) < len(cases):
        words = (folder / "log").read_text(errors="replace").splitlines()
        words = [line for line in words if line.strip() and not re.match(r"[WIE]\d{4} ", line)]
        error = f"{reason}; its last words: " + _shortened(" / ".join(words[-12:]), last=True)
        if not (folder / "started").exists():
            raise CompilerError(f"the compiler for {task['topology']} did not start: {error}")
        name = cases[len(results)]["name"]
        results.append(Compiled(case=name, error=error, error_type="died"))
    return results


def _environment(topology: Topology, flags: Sequence[str]) -> dict[str, str]:
    """The child's. It imports what this process would, from wherever that was found."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache prints no schedule
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "TPU_ACCELERATOR_TYPE": topology.accelerator_type,
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
    return f"no end after {seconds_per_case:g} s"


def _shortened(text: str, *, last: bool = False) -> str:
    text = " ".join(text.split())
    if len(text) <= ERROR_CHARS:
        return text
    return "... " + text[-ERROR_CHARS:] if last else text[:ERROR_CHARS] + " ..."


def _child(task: dict[str, Any]) -> None:
    """Compile the task's cases; one line of JSON each, its dumped files in a folder each."""
    from jax.experimental import topologies

    folder = Path(task["folder"])
    devices: Any = topologies.get_topology_desc(task["topology"], "tpu").devices
    (folder / "started").touch()
    for index, case in enumerate(task["cases"], start=task["first"]):
        line = {"case": case["name"]}
        start = time.perf_counter()
        try:
            line |= _compile(devices, case["builder"], case["options"])
        except Exception as error:
            line |= {
                "error": _shortened(str(error)) or "no words",
                "error_type": type(error).__name__,
            }
        line["seconds"] = time.perf_counter() - start
        if task["dump"] is not None:
            own = Path(task["dump"]) / f"case{index}"
            files = [path for path in own.parent.iterdir() if path.is_file()]
            own.mkdir()
            for path in files:
                path.rename(own / path.name)
        with (folder / "results").open("a") as results:
            results.write(json.dumps(line) + "\n")


def _compile(devices: Sequence[Any], builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of one case."""
    import jax
    from jax._src.mesh import abstract_device_from
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding

    from jaxattn.registry import Target

    def place(argument: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = argument.sharding or SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)

    module, _, name = builder.partition(":")
    build: Callable = getattr(importlib.import_module(module), name)
    target = Target("tpu", devices[0].device_kind)
    function, arguments, *static = build(target, devices, **options)
    shardings = [argument.sharding for argument in jax.tree.leaves(arguments)]
    meshes = [each.mesh.abstract_mesh for each in shardings if isinstance(each, NamedSharding)]
    # Pallas asks the abstract mesh for the chip where no device is attached.
    one_device = AbstractMesh(
        (1,), ("x",), (AxisType.Auto,), abstract_device=abstract_device_from(devices[0])
    )
    with jax.sharding.use_abstract_mesh(meshes[0] if meshes else one_device):
        lowered = function.lower(*jax.tree.map(place, arguments), **dict(*static))
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


if __name__ == "__main__":
    _child(json.loads(Path(sys.argv[1]).read_text()))
