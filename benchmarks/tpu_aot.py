"""Kernels compiled for a TPU that is not here: `jaxattn.engine.ahead`, and the schedules it prints.

Needs libtpu (Linux on x86-64), no TPU.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.bundles import Kernel, parse_kernel
from jaxattn.engine import ahead
from jaxattn.engine.ahead import Case, LibtpuMissingError, Topology, compile_ahead

__all__ = ["Case", "Compiled", "LibtpuMissingError", "compile_cases"]

TOPOLOGIES = {  # slices with 8 devices of one kind
    "v5e": Topology("v5e:2x4", "v5litepod-8"),
    "v5p": Topology("v5p:2x2x2", "v5p-16"),
    "v6e": Topology("v6e:2x4", "v6e-8"),
    "tpu7x": Topology("tpu7x:2x2x1", "tpu7x-8"),
}

# "memory": sizes only. "schedule": the kernels' bundles too. "scopes": the same with named scopes
# marked, which costs the kernel some bundles; for finding out what a scope covers.
Read = Literal["memory", "schedule", "scopes"]


@dataclass(frozen=True, kw_only=True)
class Compiled(ahead.Compiled):
    """One case's result for a target, and its kernels if their schedules were asked for."""

    target: str
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
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        compiled = compile_ahead(
            TOPOLOGIES[target],
            cases,
            flags=_flags(read, dump),
            seconds_per_case=seconds_per_case,
            dump=dump,
        )
        return [
            Compiled(
                **vars(each),
                target=target,
                kernels=() if each.error else _read_kernels(dump / f"case{index}"),
            )
            for index, each in enumerate(compiled)
        ]


def _flags(read: Read, dump: Path) -> list[str]:
    flags = []
    if read != "memory":
        flags += [
            f"--xla_jf_dump_to={dump}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo-static).*",
        ]
    if read == "scopes":
        flags.append("--xla_enable_custom_call_region_trace=true")
    return flags


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
