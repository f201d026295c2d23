"""The TPU slices that a plan can be made for: one host's, since an engine is one process."""

from dataclasses import dataclass

from jaxattn.engine.ahead import Topology
from jaxattn.registry import Target


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Devices of one kind, as one process sees them; `name` is the cloud's.

    A v5p chip is one device; a TPU7x chip is two, and has what two devices have. The numbers in
    both chips' names count cores, two a chip.
    """

    name: str
    chip: str  # of `jaxattn.kernels.pallas.tiles.CHIPS`
    num_devices: int
    topology: Topology
    hbm_bytes: int  # of a device, that a program may use
    hbm_gb_per_s: int  # of a device

    @property
    def target(self) -> Target:
        """What its devices are."""
        return Target.tpu(self.chip)


# What libtpu 0.0.50 says a program may use (its error for one that is too large), in GiB; and the
# HBM bandwidth in GB/s that Google Cloud's page of each TPU version states, of a device.
_HBM = {"v5e": (15.75, 819), "v5p": (95.73, 2765), "v6e": (31.24, 1640), "tpu7x": (94.74, 3690)}

_SHAPES = (  # name, devices, libtpu's topology and accelerator type
    ("v5e-1", 1, "v5e:1x1", "v5litepod-1"),
    ("v5e-4", 4, "v5e:2x2", "v5litepod-4"),
    ("v5e-8", 8, "v5e:2x4", "v5litepod-8"),
    ("v5p-2", 1, "v5p:1x1x1", "v5p-2"),
    ("v5p-8", 4, "v5p:2x2x1", "v5p-8"),
    ("v6e-1", 1, "v6e:1x1", "v6e-1"),
    ("v6e-4", 4, "v6e:2x2", "v6e-4"),
    ("v6e-8", 8, "v6e:2x4", "v6e-8"),
    ("tpu7x-2", 2, "tpu7x:1x1x1", "tpu7x-2"),
    ("tpu7x-8", 8, "tpu7x:2x2x1", "tpu7x-8"),
)


def _slice(name: str, num_devices: int, topology: str, accelerator_type: str) -> Slice:
    chip = name.partition("-")[0]
    gib, gb_per_s = _HBM[chip]
    return Slice(
        name=name,
        chip=chip,
        num_devices=num_devices,
        topology=Topology(topology, accelerator_type),
        hbm_bytes=int(gib * 2**30),
        hbm_gb_per_s=gb_per_s,
    )


SLICES = {shape[0]: _slice(*shape) for shape in _SHAPES}


def slice_of(name: str) -> Slice:
    """The slice of this name; ValueError, with what is possible, if there is none."""
    if name in SLICES:
        return SLICES[name]
    chip = name.partition("-")[0]
    same = [each for each in SLICES if each.startswith(f"{chip}-")]
    why = f"a process drives the chips of one host, of {chip} " if same else ""
    raise ValueError(f"target {name!r}: {why}{', '.join(same or SLICES)}")
