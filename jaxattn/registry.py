"""What each attention backend can do, as data; and the refusal when it cannot.

A `Need` is what one call asks for; a row of `CAPABILITIES` is what a backend does; `supports`
walks every field of the need against the row and returns all the reasons against it. Nothing is
dropped in silence: what is not claimed here raises `UnsupportedAttentionError` while tracing.
"""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import jax

from jaxattn.kernels.layout import KVLayout
from jaxattn.kernels.pallas.gpu_shape import SMEM_BYTES, GpuTiles, shape_for
from jaxattn.kernels.pallas.tiles import (
    CHIPS,
    SMEM_ENTRIES,
    Tiles,
    chip_of,
    choose_tiles,
    decode_vmem_bytes,
    prefill_vmem_bytes,
)
from jaxattn.spec import ImageRule

ANY = None  # a rule that allows every value

# Short names of GPUs, as a driver calls them, and their compute capabilities.
GPUS: dict[str, tuple[str, tuple[int, int]]] = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "l4": ("NVIDIA L4", (8, 9)),
    "t4": ("Tesla T4", (7, 5)),
}


@dataclass(frozen=True)
class Target:
    """The device that the call is compiled for.

    `compute_capability` is a GPU's, e.g. `(7, 5)`; `None` elsewhere.
    """

    platform: str
    device_kind: str = ""
    compute_capability: tuple[int, int] | None = None

    @classmethod
    def tpu(cls, chip: str) -> "Target":
        """A TPU by its short name: "v5e", "v5p", "v6e" or "tpu7x"."""
        if chip not in CHIPS:
            raise ValueError(f"{chip=}: the chips are {', '.join(map(repr, CHIPS))}")
        return cls("tpu", CHIPS[chip].device_kinds[0])

    @classmethod
    def gpu(cls, name: str) -> "Target":
        """A GPU by its short name: "h100", "h200", "b200", "a100", "l4" or "t4"."""
        if name.lower() not in GPUS:
            raise ValueError(
                f"gpu {name!r}: the names are {', '.join(map(repr, GPUS))}; for others give "
                "Target('gpu', its name, its compute capability)"
            )
        return cls("gpu", *GPUS[name.lower()])

    @classmethod
    def current(cls) -> "Target":
        """The device of the abstract mesh in use if it names one, else this process's default."""
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        if abstract is not None and abstract.platform == "tpu":
            return cls("tpu", abstract.device_kind)
        if abstract is not None and abstract.platform in ("gpu", "cuda"):
            # An abstract device has no compute capability, and lowers as Hopper whatever it is.
            return cls("gpu", abstract.device_kind, _capability_of_kind(abstract.device_kind))
        default = jax.config.jax_default_device
        if isinstance(default, str):
            default = jax.devices(default)[0]
        device = default or jax.devices()[0]
        capability = _parsed(getattr(device, "compute_capability", None))
        return cls(device.platform, device.device_kind, capability)

    def __str__(self) -> str:
        name = self.device_kind or self.platform
        if self.compute_capability is None:
            return f"{self.platform} ({name})"
        return (
            f"{name} (compute capability {self.compute_capability[0]}.{self.compute_capability[1]})"
        )


def _parsed(capability: Any) -> tuple[int, int] | None:
    """ "9.0" as numbers; None for what is not NVIDIA's, such as "gfx942"."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
    return None if match is None else (int(match[1]), int(match[2]))


def _capability_of_kind(device_kind: str) -> tuple[int, int] | None:
    """Of a device that is known by its name alone, such as "NVIDIA H100" or "NVIDIA GB200"."""
    words = device_kind.lower().replace("-", " ").split()
    for name, (_, capability) in GPUS.items():
        if any(word in (name, f"g{name}") for word in words):
            return capability
    return None


@dataclass(frozen=True, kw_only=True)
class Need:
    """Everything that one attention call asks of a backend. All static."""

    target: Target
    sliding_window: int | None
    soft_cap: float | None
    sinks: bool
    image_rule: ImageRule
    causal: bool
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    query_dtype: str
    kv_dtype: str
    first_page: bool
    update_kv_cache: bool
    table_entries: int  # sequences * pages per sequence
    interpret: bool  # run a kernel for `target` in its interpreter, on this machine's CPU
    tiles: Tiles | GpuTiles | None  # sizes to use in place of the kernel's own choice

    @property
    def layout(self) -> KVLayout:
        """How the pages lie."""
        return KVLayout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.kv_dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One backend's row. `ANY` (None) where a set is expected means no limit."""

    backend: str
    what: str
    platforms: tuple[str, ...] | None = ANY
    compute_capabilities: tuple[tuple[int, int], ...] | None = ANY
    sliding_window: bool = False
    soft_cap: bool = False
    max_soft_cap: float | None = ANY
    sinks: bool = False
    image_rules: tuple[ImageRule, ...] = ("none",)
    non_causal: bool = False
    q_heads_per_kv_head: tuple[int, int] | None = ANY  # least and most
    head_dims: tuple[int, ...] | None = ANY
    page_sizes: tuple[int, int] | None = ANY  # least and most
    page_sizes_of_two: bool = False  # powers of two only
    query_dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    first_page: bool = False
    shared_kv: bool = False
    # What a TPU kernel adds.
    chips: tuple[str, ...] | None = ANY
    max_table_entries: int | None = ANY
    quantized_page_multiple: int = 1
    needs_vmem: bool = False  # its tiles must fit the chip's VMEM
    needs_smem: bool = False  # or a GPU's shared memory
    interpreter: bool = False


@dataclass(frozen=True)
class Backend:
    """A backend of one's own: pass it as `backend=` wherever a backend's name is taken.

    Args:
        row: what it can do; all else is refused before `kernel` is called. Its name is new.
        kernel: called with the arrays and the options of `kernels.reference.ragged_paged_attention`
            in the same order and by the same names; returns the same.

    `jaxattn.testing.check_backend` holds it to the float32 reference.
    """

    row: Capabilities
    kernel: Callable[..., Any]

    def __post_init__(self) -> None:
        if not isinstance(self.row, Capabilities):
            raise TypeError(f"row={self.row!r}: expected a jaxattn.registry.Capabilities")
        if not callable(self.kernel):
            raise TypeError(f"kernel={self.kernel!r}: expected a function")
        if self.row.backend in CAPABILITIES:
            raise ValueError(f"{self.row.backend!r} is a backend of jaxattn: choose another name")


@dataclass(frozen=True)
class Reason:
    """One reason against a backend: what was asked, what it supports, what to do."""

    asked: str
    supported: str
    do: str

    def __str__(self) -> str:
        return f"{self.asked}: supported: {self.supported}; {self.do}"


_FLOATS = ("float32", "bfloat16")
_KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")

CAPABILITIES: dict[str, Capabilities] = {
    row.backend: row
    for row in (
        Capabilities(
            backend="pallas_tpu",
            what="Pallas kernels for TPU",
            platforms=("tpu",),
            chips=tuple(CHIPS),
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            image_rules=("none", "clamp", "extend"),
            non_causal=True,
            q_heads_per_kv_head=(1, 16),
            head_dims=(64, 80, 96, 128, 192, 256),
            page_sizes=(8, 256),
            query_dtypes=_FLOATS,
            kv_dtypes=_KV_DTYPES,
            first_page=True,
            shared_kv=True,
            max_table_entries=SMEM_ENTRIES,
            quantized_page_multiple=32,  # whole registers of scales
            needs_vmem=True,
            interpreter=True,
        ),
        Capabilities(
            backend="pallas_gpu",
            what="Pallas kernels for Hopper GPUs",
            platforms=("gpu",),
            compute_capabilities=((9, 0),),
            sliding_window=True,
            soft_cap=True,
            max_soft_cap=1e4,  # its tanh is good to 1e-7 of the cap
            sinks=True,
            image_rules=("none", "clamp", "extend"),
            non_causal=True,
            q_heads_per_kv_head=(1, 32),
            head_dims=(64, 80, 96, 128, 192, 256),
            page_sizes=(16, 128),
            page_sizes_of_two=True,
            query_dtypes=("bfloat16",),
            kv_dtypes=("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"),
            first_page=True,
            shared_kv=True,
            needs_smem=True,
            interpreter=True,
        ),
        Capabilities(
            backend="xla",
            what="portable XLA, the fast path on CPU",
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            image_rules=("none", "clamp", "extend"),
            non_causal=True,
            q_heads_per_kv_head=(1, 32),
            head_dims=(8, 16, 32, 64, 80, 96, 128, 192, 256),
            page_sizes=(1, 512),
            query_dtypes=_FLOATS,
            kv_dtypes=_KV_DTYPES,
            first_page=True,
            shared_kv=True,
        ),
        Capabilities(
            backend="reference",
            what="dense float32 oracle, slow, for tests",
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            image_rules=("none", "clamp", "extend"),
            non_causal=True,
            query_dtypes=_FLOATS,
            kv_dtypes=_KV_DTYPES,
            first_page=True,
            shared_kv=True,
        ),
    )
}

# `backend=None` tries these in order. The reference is never chosen in silence: ask for it.
AUTOMATIC = ("pallas_tpu", "pallas_gpu", "xla")


class UnsupportedAttentionError(NotImplementedError):
    """No candidate backend can do exactly what was asked; the message lists every reason.

    `need` is what was asked, `reasons` maps each candidate to what speaks against it, and
    `alternatives` names the backends outside the candidates that could serve the need.
    """

    def __init__(
        self, need: Need, reasons: dict[str, tuple[Reason, ...]], alternatives: tuple[str, ...]
    ):
        self.need, self.reasons, self.alternatives = need, reasons, alternatives
        lines = [f"{', '.join(map(repr, reasons))} cannot serve this attention on {need.target}:"]
        for backend, against in reasons.items():
            lines += [f"  {backend}: {reason}" for reason in against]
        if alternatives:
            lines.append(f"  backends that can: {', '.join(map(repr, alternatives))}")
        super().__init__("\n".join(lines))


def _flag(asked: str, needed: bool, allowed: bool, do: str) -> Reason | None:
    return Reason(asked, "no", do) if needed and not allowed else None


def _among(name: str, value: Any, allowed: tuple | None, do: str) -> Reason | None:
    if allowed is ANY or value in allowed:
        return None
    return Reason(f"{name}={value}", ", ".join(map(str, allowed)) or "none", do)


def _between(name: str, value: int, limits: tuple[int, int] | None, do: str) -> Reason | None:
    if limits is ANY or limits[0] <= value <= limits[1]:
        return None
    return Reason(f"{name}={value}", f"{limits[0]} to {limits[1]}", do)


def _device(row: Capabilities, need: Need) -> Reason | None:
    target = need.target
    if row.platforms is not ANY and target.platform not in row.platforms:
        do = "use backend='xla'"
        if row.interpreter:
            do = f"run it here with interpret=True, name an absent chip by target=, or {do}"
        return Reason(f"on {target}", "platform " + ", ".join(row.platforms), do)
    chip = chip_of(target.device_kind)
    if row.chips is not ANY and (chip is None or chip.name not in row.chips):
        return Reason(f"on {target}", "TPU " + ", ".join(row.chips), "use backend='xla'")
    claimed, capability = row.compute_capabilities, target.compute_capability
    if claimed is not ANY and capability not in claimed:
        # Each generation has matrix instructions of its own, and later ones lack Hopper's.
        supported = "compute capability " + ", ".join("{}.{}".format(*each) for each in claimed)
        supported += f" ({', '.join(name for name, (_, its) in GPUS.items() if its in claimed)})"
        return Reason(f"on {target}", supported, "use backend='xla'")
    return None


def _soft_cap(row: Capabilities, need: Need) -> Reason | None:
    asked, most = f"soft_cap={need.soft_cap}", row.max_soft_cap
    if need.soft_cap is not None and row.soft_cap and most is not ANY and need.soft_cap > most:
        return Reason(asked, f"up to {most:g}", "leave out a cap that no score reaches")
    return _flag(asked, need.soft_cap is not None, row.soft_cap, _OTHER)


def _query_dtype(row: Capabilities, need: Need) -> Reason | None:
    do = "cast q, k and v to one of these"
    if need.query_dtype == "float16":
        do = (
            "use bfloat16 (the same bytes) or float32: Gemma 3 activations exceed float16's "
            "largest number, 65504"
        )
    return _among("query dtype", need.query_dtype, row.query_dtypes, do)


def _kv_dtype(row: Capabilities, need: Need) -> Reason | None:
    chip = chip_of(need.target.device_kind)
    if row.chips is not ANY and chip and "float8" in need.kv_dtype and not chip.float8:
        supported = "chips with float8 arithmetic: " + ", ".join(
            each.name for each in CHIPS.values() if each.float8
        )
        return Reason(f"cache dtype={need.kv_dtype} on {chip.name}", supported, "use int8")
    return _among("cache dtype", need.kv_dtype, row.kv_dtypes, "plan the cache with one of these")


def _page_size(row: Capabilities, need: Need) -> Reason | None:
    do = "plan the cache with another page_size"
    step = row.quantized_page_multiple
    if need.layout.is_quantized and need.page_size % step:
        asked = f"page_size={need.page_size} with a cache of {need.kv_dtype}"
        return Reason(asked, f"multiples of {step}", do)
    if row.page_sizes_of_two:
        least, most = row.page_sizes or (1, 512)
        powers = [2**n for n in range(10) if least <= 2**n <= most]
        return _among("page_size", need.page_size, tuple(powers), do)
    return _between("page_size", need.page_size, row.page_sizes, do)


def _table_entries(row: Capabilities, need: Need) -> Reason | None:
    if row.max_table_entries is ANY or need.table_entries <= row.max_table_entries:
        return None
    return Reason(
        f"a page table of {need.table_entries} entries (sequences * pages per sequence)",
        f"up to {row.max_table_entries}, which fit SMEM",
        f"plan the cache with a page_size above {need.page_size}, or fewer sequences a step",
    )


def _tiles(row: Capabilities, need: Need) -> Reason | None:
    """The fast memory that all sizes together take."""
    kinds = [Tiles] * row.needs_vmem + [GpuTiles] * row.needs_smem
    if need.tiles is not None and type(need.tiles) not in kinds:
        supported = " or ".join(f"jaxattn.{kind.__name__}" for kind in kinds) or "none"
        return Reason(f"tiles={need.tiles}", supported, "leave them out")
    against = _vmem(need) if row.needs_vmem else None
    return against or (_smem(row, need) if row.needs_smem else None)


def _smem(row: Capabilities, need: Need) -> Reason | None:
    if row.head_dims is not ANY and need.head_dim not in row.head_dims:
        return None  # refused as that, and has no tiles
    tiles = need.tiles if isinstance(need.tiles, GpuTiles) else GpuTiles()
    shapes = [
        shape_for(
            need.layout,
            num_q_heads=need.num_q_heads,
            decode=decode,
            soft_cap=need.soft_cap,
            sm_scale=1.0,
            tiles=tiles,
        )
        for decode in (True, False)
    ]
    needed, shape = max(((each.smem_bytes(), each) for each in shapes), key=lambda each: each[0])
    if needed <= SMEM_BYTES:
        return None
    return Reason(
        f"{needed / 1024:.0f} KiB of shared memory for head_dim={need.head_dim} and a cache of "
        f"{need.kv_dtype}, with {shape.stages} stages of {shape.tile_tokens} tokens",
        f"{SMEM_BYTES // 1024} KiB",
        "pass smaller tiles, or leave them out",
    )


def _vmem(need: Need) -> Reason | None:
    tiles = need.tiles if isinstance(need.tiles, Tiles) else Tiles()
    chip = chip_of(need.target.device_kind)
    if chip is None:
        return None
    decode, prefill = choose_tiles(
        need.layout,
        most_tokens=None if need.image_rule == "extend" else need.sliding_window,
        num_q_heads=need.num_q_heads,
        query_dtype=need.query_dtype,
        chip=chip,
        override=tiles,
    )
    sizes = need.layout, need.num_q_heads, need.query_dtype
    needed, taken = max(
        (decode_vmem_bytes(*sizes, decode), str(decode)),
        (prefill_vmem_bytes(*sizes, prefill), str(prefill)),
    )
    if needed <= chip.usable_vmem_bytes:
        return None
    return Reason(
        f"{needed / 2**20:.0f} MiB of VMEM for {need.num_q_heads} query heads and "
        f"{need.num_kv_heads} kv heads of {need.head_dim}, with {taken}",
        f"{chip.usable_vmem_bytes / 2**20:.0f} MiB on {chip.name}",
        "shard the heads over more chips, pass smaller tiles, or use backend='xla'",
    )


def _heads(row: Capabilities, need: Need) -> Reason | None:
    ratio = need.num_q_heads // need.num_kv_heads
    do = "repeat the kv heads, or use another backend"
    return _between("query heads per kv head", ratio, row.q_heads_per_kv_head, do)


_OTHER = "use another backend"
_Rule = Callable[[Capabilities, Need], Reason | None]
# One rule for every field of `Need`, in the order in which reasons are listed.
_RULES: dict[str, _Rule] = {
    "target": _device,
    "sliding_window": lambda row, need: _flag(
        f"sliding_window={need.sliding_window}",
        need.sliding_window is not None,
        row.sliding_window,
        f"{_OTHER}: a window is never ignored",
    ),
    "soft_cap": _soft_cap,
    "sinks": lambda row, need: _flag("attention sinks", need.sinks, row.sinks, _OTHER),
    "image_rule": lambda row, need: _among("image_rule", need.image_rule, row.image_rules, _OTHER),
    "causal": lambda row, need: _flag("causal=False", not need.causal, row.non_causal, _OTHER),
    "num_q_heads": _heads,
    "num_kv_heads": lambda row, need: None,  # judged with num_q_heads, as a ratio
    "head_dim": lambda row, need: _among(
        "head_dim", need.head_dim, row.head_dims, "pad the head dimension to one of these"
    ),
    "page_size": _page_size,
    "query_dtype": _query_dtype,
    "kv_dtype": _kv_dtype,
    "first_page": lambda row, need: _flag(
        "first_page (a table of live pages only)",
        need.first_page,
        row.first_page,
        "pass the whole page table",
    ),
    "update_kv_cache": lambda row, need: _flag(
        "update_kv_cache=False (a layer that shares KV)",
        not need.update_kv_cache,
        row.shared_kv,
        _OTHER,
    ),
    "table_entries": _table_entries,
    "interpret": lambda row, need: _flag(
        "interpret=...", need.interpret, row.interpreter, "leave it out, or name a Pallas backend"
    ),
    "tiles": _tiles,
}
if set(_RULES) != {field.name for field in fields(Need)}:
    raise TypeError("every field of Need has exactly one rule")


def supports(row: Capabilities, need: Need) -> tuple[Reason, ...]:
    """Every reason why this backend cannot serve the need; empty when it can."""
    found = (rule(row, need) for rule in _RULES.values())
    return tuple(reason for reason in found if reason is not None)


def check_backend_name(backend: str | Backend | None) -> None:
    """Raise ValueError unless `backend` is None, a row's name, or a backend of one's own."""
    if backend is not None and not isinstance(backend, Backend) and backend not in CAPABILITIES:
        raise ValueError(f"{backend=}: the backends are {', '.join(map(repr, CAPABILITIES))}")


def select(need: Need, backend: str | Backend | None = None) -> str:
    """The backend to run: the one asked for, or the first of `AUTOMATIC` that supports the need.

    Raises:
        UnsupportedAttentionError: with every reason of every candidate.
        ValueError: `backend` is not the name of a row.
    """
    check_backend_name(backend)
    if isinstance(backend, Backend):
        candidates = {backend.row.backend: backend.row}
    else:
        names = AUTOMATIC if backend is None else (backend,)
        candidates = {name: CAPABILITIES[name] for name in names}
    reasons = {}
    for name, row in candidates.items():
        reasons[name] = supports(row, need)
        if not reasons[name]:
            if backend is None:
                _log_choice(name, need.target, tuple(_passed_over(reasons, need.target)))
            return name
    others = [name for name in CAPABILITIES if name not in candidates]
    alternatives = tuple(name for name in others if not supports(CAPABILITIES[name], need))
    raise UnsupportedAttentionError(need, reasons, alternatives)


def _passed_over(reasons: dict[str, tuple[Reason, ...]], target: Target) -> Iterable[str]:
    """What speaks against the backends that are made for this target's platform."""
    for name, against in reasons.items():
        row = CAPABILITIES[name]
        if row.platforms is not ANY and target.platform in row.platforms:
            yield from (f"{name}: {reason}" for reason in against)


@cache
def _log_choice(backend: str, target: Target, passed_over: tuple[str, ...]) -> None:
    log = logging.getLogger("jaxattn")
    if passed_over:
        against = "; ".join(passed_over)
        log.warning("attention backend %r chosen on %s: %s", backend, target, against)
    else:
        log.info("attention backend %r chosen on %s", backend, target)
