"""Read the TPU compiler's final schedule of a kernel: its loops, their bundles and busy units.

A bundle is one VLIW instruction and takes one cycle when nothing stalls. The compiler prints one
line a bundle,

       0x3f LB: >> { %v1 = vld [...]  ;;  %s2 = sadd.s32 1, %s3 } /* Start region 80 */
       0xa6   : >> { %9 = sbr.rel (!%p4) target = $region80 }

and, in a second file, how many slots of each unit each bundle fills. A branch backwards makes a
loop, which ends after the branch's delay slots.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The units' names in the compiler's file. FILL and SPILL are registers loaded back and stored.
UNITS = (
    "MXU",
    "XLU",
    "VALU",
    "VPOP",
    "EUP",
    "VLOAD",
    "VLOAD:FILL",
    "VSTORE",
    "VSTORE:SPILL",
    "SALU",
)
DELAY_SLOTS = 4  # at most; fewer where the next block begins earlier (TPU7x)

_BUNDLE = re.compile(r"\s*(?:0x([0-9a-f]+)|(0))\s+(?:([A-Z]{2}):|:)\s*>*\s*\{(.*)", re.DOTALL)
_BRANCH = re.compile(r"sbr\.(\w+)(?: \([^)]*\))?(?: target = \$region(\d+))?")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_TRACE = re.compile(r"TraceMeStart\((.*?)\) \[|\] TraceMeEnd\((.*?)\)")


@dataclass(frozen=True)
class Span:
    """Bundles `start .. end` and how many slots of each unit they fill."""

    start: int
    end: int
    units: Mapping[str, int]

    @property
    def bundles(self) -> int:
        return self.end - self.start

    @property
    def spills(self) -> int:
        """Registers stored and loaded back because there were too few."""
        return self.units["VSTORE:SPILL"] + self.units["VLOAD:FILL"]

    def holds(self, other: "Span") -> bool:
        """Whether the other span lies inside this one."""
        return self != other and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class Loop(Span):
    """A loop's body, with all that lies in it; `depth` is 1 outside every other loop."""

    depth: int


@dataclass(frozen=True)
class Scope(Span):
    """What a `jax.named_scope` in the kernel covers (only in a traced compilation)."""

    name: str


@dataclass(frozen=True)
class Kernel:
    """One Mosaic kernel of a compiled program."""

    name: str
    whole: Span
    loops: tuple[Loop, ...]
    scopes: tuple[Scope, ...]

    def hot_loops(self) -> tuple[Loop, ...]:
        """The loops that compute, the largest first; ValueError if there is none.

        They use the MXU and hold no other loop that does (but may hold loops of copies).
        """
        busy = [loop for loop in self.loops if loop.units["MXU"]]
        found = [loop for loop in busy if not any(map(loop.holds, busy))]
        if not found:
            raise ValueError(f"kernel {self.name!r}: none of its {len(self.loops)} loops computes")
        return tuple(sorted(found, key=lambda loop: -loop.bundles))

    def around(self, loop: Loop) -> Loop:
        """The innermost loop that holds this one; ValueError if there is none."""
        found = [each for each in self.loops if each.holds(loop)]
        if not found:
            raise ValueError(f"kernel {self.name!r}: no loop around that at {loop.start:#x}")
        return max(found, key=lambda each: each.depth)

    def in_scope(self, name: str, inside: Span) -> tuple[Scope, ...]:
        """The named scopes inside a loop; ValueError where one lies in another of its name."""
        found = tuple(each for each in self.scopes if each.name == name and inside.holds(each))
        if any(a.holds(b) for a in found for b in found):
            raise ValueError(f"kernel {self.name!r}: scopes {name!r} in one another")
        return found


def parse_kernel(name: str, bundles_text: str, utilization_text: str) -> Kernel:
    """The schedule in the compiler's two files `final_bundles` and `per-bundle-utilization`.

    Raises ValueError where they do not have the known form or do not fit together.
    """
    bundles = _bundles(bundles_text)
    slots = _slots(utilization_text)
    if not bundles or len(bundles) != len(slots):
        raise ValueError(f"kernel {name!r}: {len(bundles)} bundles, utilization of {len(slots)}")

    def span(start: int, end: int) -> tuple[int, int, dict[str, int]]:
        sums = [sum(column) for column in zip(*slots[start:end], strict=True)]
        return start, end, dict(zip(UNITS, sums or [0] * len(UNITS), strict=True))

    extents = _loops(name, bundles)
    loops = []
    for start, end in extents:
        depth = 1 + sum(a <= start and end <= b for a, b in extents if (a, b) != (start, end))
        loops.append(Loop(*span(start, end), depth=depth))
    scopes = [Scope(*span(start, end), name=scope) for scope, start, end in _scopes(name, bundles)]
    return Kernel(name, Span(*span(0, len(bundles))), tuple(loops), tuple(scopes))


def _bundles(text: str) -> list[tuple[str | None, str]]:
    """(tag, instructions and comments) of each bundle; a bundle may go over several lines."""
    out: list[tuple[str | None, str]] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            address = int(match[1] or "0", 16)
            if address != len(out):
                raise ValueError(f"bundle {address:#x} follows {len(out)} bundles")
            out.append((match[3], match[4]))
        elif out:
            tag, body = out[-1]
            out[-1] = tag, body + "\n" + line
    return out


def _slots(text: str) -> list[list[int]]:
    """Per bundle the slots filled, in the order of `UNITS`."""
    head, found, table = text.partition("== UTILIZATION:")
    names = tuple(name.strip() for name in head.splitlines()[1].split(",")) if found else ()
    if names != UNITS:
        raise ValueError(f"utilization of units {names}, expected {UNITS}")
    rows = [[int(value) for value in line.split()] for line in table.splitlines() if line.strip()]
    if any(len(row) != len(UNITS) for row in rows):
        raise ValueError(f"utilization rows do not have {len(UNITS)} columns")
    return rows


def _loops(name: str, bundles: list[tuple[str | None, str]]) -> list[tuple[int, int]]:
    """(start, end) of every loop; of several branches back to one bundle the last counts."""
    regions: dict[str, int] = {}
    for index, (_, body) in enumerate(bundles):
        for region in _REGION.findall(body):
            regions.setdefault(region, index)
    ends: dict[int, int] = {}
    for index, (_, body) in enumerate(bundles):
        for kind, region in _BRANCH.findall(body):
            if kind != "rel" or not region:
                raise ValueError(f"kernel {name!r}: unknown branch at {index:#x}: {body[:200]!r}")
            # A branch to the kernel's very end may name a region that is not printed.
            if regions.get(region, len(bundles)) > index:
                continue
            end = min(index + 1 + DELAY_SLOTS, len(bundles))
            tagged = (i for i in range(index + 1, end) if bundles[i][0] is not None)
            ends[regions[region]] = next(tagged, end)
    bodies = sum(tag == "LB" for tag, _ in bundles)
    if bodies != len(ends):
        raise ValueError(f"kernel {name!r}: {bodies} loop bodies, but {len(ends)} branches back")
    return sorted(ends.items())


def _scopes(name: str, bundles: list[tuple[str | None, str]]) -> list[tuple[str, int, int]]:
    """(name, start, end) of the traced scopes, without their two marks."""
    out, opened = [], []
    for index, (_, body) in enumerate(bundles):
        for start, end in _TRACE.findall(body):
            if start:
                opened.append((start, index + 1))
            elif opened and opened[-1][0] == end:
                out.append((*opened.pop(), index))
            else:
                raise ValueError(f"kernel {name!r}: scope {end!r} ends at {index:#x} unopened")
    if opened:
        raise ValueError(f"kernel {name!r}: scopes {opened} never end")
    return out
