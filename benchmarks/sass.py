"""A Mosaic GPU kernel out of the compiler's files: registers, spills, shared memory, opcodes.

The assembler's log (`.ptxas`), its machine code as text (`.sass_ctrl`) and the launch in the first
of the compiler's own files (`.before_layout_inference.txt`). All are counts, none is a time.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# An instruction's address in a comment, its predicate if it has one, and its name.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*)")
_MODULE = ".before_layout_inference.txt"
_SHARED = re.compile(r"gpu\.launch.* dynamic_shared_memory_size %c(\d+)_i32")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel; `registers` are of a thread when it starts, before warpgroups trade theirs."""

    name: str
    registers: int
    spill_bytes: int  # stored and loaded
    smem_bytes: int | None  # that the launch asks for; None if it is not known
    instructions: int
    losses: int  # remarks of the assembler's that it made matrix instructions wait, or the like
    opcodes: dict[str, int] = field(default_factory=dict)

    def count(self, *opcodes: str) -> int:
        """Instructions of these names, whatever follows the name's first dot."""
        return sum(self.opcodes.get(opcode, 0) for opcode in opcodes)


def parse_kernel(name: str, log: str, machine_code: str, module: str | None) -> Kernel:
    """One kernel from the text of its files; ValueError if one says nothing."""
    registers = re.search(r"Used (\d+) registers", log)
    shared = None if module is None else _SHARED.search(module)
    opcodes = Counter(_INSTRUCTION.findall(machine_code))
    if registers is None or not opcodes or (module is not None and shared is None):
        raise ValueError(f"{name!r}: cannot read {registers=}, {shared=}, {len(opcodes)} opcodes")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.partition("properties")[2])
    return Kernel(
        name=name,
        registers=int(registers[1]),
        spill_bytes=sum(map(int, spills)),
        smem_bytes=int(shared[1]) if shared else None,
        instructions=opcodes.total(),
        losses=log.count("Potential Performance Loss"),
        opcodes=dict(opcodes),
    )


def read_kernels(folder: Path) -> tuple[Kernel, ...]:
    """Every kernel whose files are in the folder, in the order in which they were compiled.

    The compiler numbers its files anew after it has merged equal kernels. Where it has, which
    module a kernel came from is not known.
    """
    stems = _stems(folder, ".ptxas")
    modules = _stems(folder, _MODULE)
    kernels = []
    for stem in stems:
        module = (folder / (stem + _MODULE)).read_text() if stems == modules else None
        log, code = ((folder / (stem + ending)).read_text() for ending in (".ptxas", ".sass_ctrl"))
        kernels.append(parse_kernel(stem.rpartition("_")[0], log, code, module))
    return tuple(kernels)


def _stems(folder: Path, ending: str) -> list[str]:
    names = [path.name.removesuffix(ending) for path in folder.glob("*" + ending)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))
