"""What each attention backend can do, as data; and the refusal when it cannot.

A `Need` is what one call asks for; a row of `CAPABILITIES` is what a backend does; `supports`
walks every field of the need against the row and returns all the reasons against it. Nothing is
dropped in silence: what is not claimed here raises `UnsupportedAttentionError` while tracing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import jax

from jaxattn.spec import ImageRule

ANY = None  # a rule that allows every value


@dataclass(frozen=True)
class Target:
    """The device that the call is compiled for.

    `compute_capability` is a GPU's, e.g. `(7, 5)`; `None` elsewhere.
    """

    platform: str
    device_kind: str = ""
    compute_capability: tuple[int, int] | None = None

    @classmethod
    def current(cls) -> "Target":
        """The default device of this process, as an explicit target."""
        default = jax.config.jax_default_device
        if isinstance(default, str):
            default = jax.devices(default)[0]
        device = default or jax.devices()[0]
        capability = getattr(device, "compute_capability", None)
        if capability is not None:
            major, _, minor = str(capability).partition(".")
            capability = (int(major), int(minor or 0))
        return cls(device.platform, device.device_kind, capability)

    def __str__(self) -> str:
        name = self.device_kind or self.platform
        if self.compute_capability is None:
            return f"{self.platform} ({name})"
        return (
            f"{name} (compute capability {self.compute_capability[0]}.{self.compute_capability[1]})"
        )


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


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One backend's row. `ANY` (None) where a set is expected means no limit."""

    backend: str
    what: str
    missing: str = ""  # why the backend cannot be used at all yet; "" when it can
    platforms: tuple[str, ...] | None = ANY
    min_compute_capability: tuple[int, int] | None = ANY
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    image_rules: tuple[ImageRule, ...] = ("none",)
    non_causal: bool = False
    q_heads_per_kv_head: tuple[int, int] | None = ANY  # least and most
    head_dims: tuple[int, ...] | None = ANY
    page_sizes: tuple[int, int] | None = ANY  # least and most
    query_dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    first_page: bool = False
    shared_kv: bool = False


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
            what="Pallas kernel for TPU",
            missing="the TPU kernel is not part of this release",
            platforms=("tpu",),
        ),
        Capabilities(
            backend="pallas_gpu",
            what="Pallas kernel for GPU (Hopper)",
            missing="the GPU kernel is not part of this release",
            platforms=("gpu",),
            min_compute_capability=(9, 0),
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
        return Reason(f"on {target}", "platform " + ", ".join(row.platforms), "use backend='xla'")
    least = row.min_compute_capability
    if least is not ANY and (target.compute_capability or (0, 0)) < least:
        return Reason(
            f"on {target}", f"compute capability >= {least[0]}.{least[1]}", "use backend='xla'"
        )
    return None


def _query_dtype(row: Capabilities, need: Need) -> Reason | None:
    do = "cast q, k and v to one of these"
    if need.query_dtype == "float16":
        do = (
            "use bfloat16 (the same bytes) or float32: Gemma 3 activations exceed float16's "
            "largest number, 65504"
        )
    return _among("query dtype", need.query_dtype, row.query_dtypes, do)


def _heads(row: Capabilities, need: Need) -> Reason | None:
    ratio = need.num_q_heads // need.num_kv_heads
    do = "use backend='reference' or repeat the kv heads"
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
    "soft_cap": lambda row, need: _flag(
        f"soft_cap={need.soft_cap}", need.soft_cap is not None, row.soft_cap, _OTHER
    ),
    "sinks": lambda row, need: _flag("attention sinks", need.sinks, row.sinks, _OTHER),
    "image_rule": lambda row, need: _among("image_rule", need.image_rule, row.image_rules, _OTHER),
    "causal": lambda row, need: _flag("causal=False", not need.causal, row.non_causal, _OTHER),
    "num_q_heads": _heads,
    "num_kv_heads": lambda row, need: None,  # judged with num_q_heads, as a ratio
    "head_dim": lambda row, need: _among(
        "head_dim", need.head_dim, row.head_dims, "pad the head dimension to one of these"
    ),
    "page_size": lambda row, need: _between(
        "page_size", need.page_size, row.page_sizes, "plan the cache with another page_size"
    ),
    "query_dtype": _query_dtype,
    "kv_dtype": lambda row, need: _among(
        "cache dtype", need.kv_dtype, row.kv_dtypes, "plan the cache with one of these"
    ),
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
}
if set(_RULES) != {field.name for field in fields(Need)}:
    raise TypeError("every field of Need has exactly one rule")


def supports(row: Capabilities, need: Need) -> tuple[Reason, ...]:
    """Every reason why this backend cannot serve the need; empty when it can."""
    device = _device(row, need)
    if row.missing:
        unavailable = Reason(
            f"backend={row.backend!r}", f"not yet ({row.missing})", "use backend='xla'"
        )
        return (unavailable, device) if device else (unavailable,)
    found = (rule(row, need) for rule in _RULES.values())
    return tuple(reason for reason in found if reason is not None)


def select(need: Need, backend: str | None = None) -> str:
    """The backend to run: the one asked for, or the first of `AUTOMATIC` that supports the need.

    Raises:
        UnsupportedAttentionError: with every reason of every candidate.
        ValueError: `backend` is not the name of a row.
    """
    if backend is not None and backend not in CAPABILITIES:
        raise ValueError(f"{backend=}: the backends are {', '.join(map(repr, CAPABILITIES))}")
    candidates = AUTOMATIC if backend is None else (backend,)
    reasons = {}
    for name in candidates:
        reasons[name] = supports(CAPABILITIES[name], need)
        if not reasons[name]:
            if backend is None:
                _log_choice(name, str(need.target))
            return name
    others = [name for name in CAPABILITIES if name not in candidates]
    alternatives = tuple(name for name in others if not supports(CAPABILITIES[name], need))
    raise UnsupportedAttentionError(need, reasons, alternatives)


@cache
def _log_choice(backend: str, target: str) -> None:
    logging.getLogger("jaxattn").info("attention backend %r chosen on %s", backend, target)
