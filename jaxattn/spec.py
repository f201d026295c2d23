"""What a layer sees (MaskSpec), what it stores (StoreSpec), and both together (LayerSpec).

Two types, so that a mask can never be read off a cache group: groups are keyed by
`StoreSpec` alone and never hold a `MaskSpec`. All three are frozen and hashable: they are
static values, and a layer's attention is specialised on them.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import jax

from jaxattn.kernels.layout import KVLayout, QuantizedPages

# How a layer treats bidirectional image spans. With W the layer's window:
#   "none"    spans are ignored
#   "clamp"   sees k if  q - W < k  AND (k <= q  OR  q and k are in one image)
#   "extend"  sees k if (q - W < k  AND  k <= q) OR  q and k are in one image
ImageRule = Literal["none", "clamp", "extend"]

_MAX_WINDOW = 2**31 - 1  # positions are int32
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which keys a query may see. Static, per layer, never shared by a group.

    `sliding_window = W`: a query at absolute position q sees keys k with q - W < k <= q, so W
    counts the query's own key. `None` means no window. W = 3, six tokens:

        key   0 1 2 3 4 5
        q=0   x . . . . .
        q=1   x x . . . .
        q=2   x x x . . .
        q=3   . x x x . .
        q=4   . . x x x .
        q=5   . . . x x x

    With `causal=False` the window is symmetric: |q - k| < W.
    `soft_cap = c` replaces a score s by c * tanh(s / c). `sinks` adds one learnt logit per
    query head to the softmax's denominator.
    """

    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    image_rule: ImageRule = "none"
    causal: bool = True

    def __post_init__(self) -> None:
        check_sliding_window(self.sliding_window)
        check_soft_cap(self.soft_cap)
        if self.image_rule not in get_args(ImageRule):
            raise ValueError(f"image_rule={self.image_rule!r}: use one of {get_args(ImageRule)}")


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """What decides the bytes and the lifetime of a layer's keys and values.

    `retention`: how many past tokens must stay readable, `None` for all of them. `dtype` is the
    stored type; int8 and float8 are stored with one float32 scale per token and kv head. `shards`:
    devices that the kv heads are cut over; each lays out its own as if there were no others.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    retention: int | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        for name in ("page_size", "num_kv_heads", "head_dim", "shards"):
            check_positive_int(name, getattr(self, name))
        if self.retention is not None:
            check_positive_int("retention", self.retention)
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: a cache stores one of {', '.join(KV_DTYPES)}")
        if self.num_kv_heads % self.shards:
            raise ValueError(
                f"{self.num_kv_heads} kv heads cannot be cut over {self.shards} devices: give each "
                "as many, or repeat the kv heads"
            )

    @property
    def layout(self) -> KVLayout:
        """How one layer's tokens lie in the pages of one device."""
        return KVLayout(
            num_kv_heads=self.num_kv_heads // self.shards,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
        )

    def pages(self, num_pages: int) -> jax.ShapeDtypeStruct | QuantizedPages:
        """Shape and dtype of one layer's pool: the rows of each device one after the other."""
        own = self.layout.pages(num_pages)
        if not isinstance(own, QuantizedPages):
            return self._of_all(own, 2)
        scales = self._of_all(own.scales, 1)  # type: ignore[arg-type]
        return QuantizedPages(self._of_all(own.values, 2), scales)  # type: ignore[arg-type]

    def _of_all(self, own: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
        shape = list(own.shape)
        shape[axis] *= self.shards
        return jax.ShapeDtypeStruct(tuple(shape), own.dtype)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One attention layer: its mask, its storage, and what only the layer knows.

    `scale` multiplies the scores (before the soft cap). A layer with `share_kv_from` reads the
    pages of that earlier layer, under a mask of its own, and writes nothing.
    """

    name: str
    num_q_heads: int
    scale: float
    mask: MaskSpec
    store: StoreSpec
    share_kv_from: str | None = None

    def __post_init__(self) -> None:
        check_positive_int("num_q_heads", self.num_q_heads)
        if self.num_q_heads % self.store.num_kv_heads:
            raise ValueError(
                f"layer {self.name!r}: num_q_heads={self.num_q_heads} is not a multiple of "
                f"num_kv_heads={self.store.num_kv_heads}"
            )
        window, retention = self.mask.sliding_window, self.store.retention
        if retention is not None and (window is None or retention < window):
            raise ValueError(
                f"layer {self.name!r}: retention={retention} keeps less than its "
                f"sliding_window={window} can see; use retention=None or at least the window"
            )


def check_positive_int(name: str, value: object) -> None:
    """Raise unless `value` is a Python int (not a bool, not traced) of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a Python int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")


def check_positive_float(name: str, value: object) -> None:
    """Raise unless `value` is a positive, finite Python float."""
    if not isinstance(value, float) or not (isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r}: expected a positive, finite float")


def check_sliding_window(value: object) -> None:
    """Raise unless `value` is `None` or a Python int of at least 1: no -1, no 0, no pair."""
    if value is None:
        return
    try:
        check_positive_int("sliding_window", value)
        if value > _MAX_WINDOW:  # type: ignore[operator]
            raise ValueError(f"sliding_window={value}: expected at most {_MAX_WINDOW}")
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}. A window is static: a Python int that counts the query's own key, or None "
            "for no window (not -1, not 0, not (left, right))"
        ) from None


def check_soft_cap(value: object) -> None:
    """Raise unless `value` is `None` or a positive, finite Python float."""
    if value is None:
        return
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError(
            f"soft_cap={value!r}: expected a Python float, got {type(value).__name__}; "
            "a soft cap is static"
        )
    if not (isfinite(value) and value > 0):
        raise ValueError(f"soft_cap={value}: expected a positive, finite number or None for none")
