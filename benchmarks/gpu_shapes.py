"""The attention layers that the GPU benchmarks look at, and one call of each to compile."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tpu_aot import Case
from jaxattn import Target, ragged_paged_attention
from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.gpu_shape import GpuShape, GpuTiles, shape_for

BACKEND = "pallas_gpu"
QUERY_DTYPE = "bfloat16"
SEQS, TOKENS, TABLE_TOKENS = 64, 256, 8192  # of a call that is compiled
POOL_TOKENS = 32 * TABLE_TOKENS  # so many that a copy of the pool dwarfs all else


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention layer: its geometry, mask and cache. Static."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    image_rule: str = "none"
    page_size: int = 16
    kv_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """What tells it from other rows."""
        parts = [f"{self.model}, {self.kv_dtype}, page {self.page_size}"]
        parts += [f"W {self.sliding_window}"] if self.sliding_window else []
        parts += [f"cap {self.soft_cap:g}"] if self.soft_cap else []
        parts += ["sinks"] if self.sinks else []
        parts += ["images"] if self.image_rule != "none" else []
        return ", ".join(parts)

    @property
    def layout(self) -> KVLayout:
        """How its pages lie."""
        return KVLayout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.kv_dtype,
        )

    @property
    def sm_scale(self) -> float:
        """Multiplies scores."""
        return self.head_dim**-0.5

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, with their scales."""
        layout = self.layout
        scales = 4 * layout.scale_rows * layout.pack if layout.is_quantized else 0
        return 4 * layout.rows * LANES + scales  # rows are of 32-bit words

    def flops(self, pairs: int) -> int:
        """Of scores and weighted values, for pairs of a query and a key that it sees."""
        return 4 * pairs * self.num_q_heads * self.head_dim

    def shape(self, *, decode: bool) -> GpuShape:
        """The sizes that the kernel chooses."""
        return shape_for(
            self.layout,
            num_q_heads=self.num_q_heads,
            decode=decode,
            soft_cap=self.soft_cap,
            sm_scale=self.sm_scale,
            tiles=GpuTiles(),
        )

    def case(self) -> Case:
        """The call to compile, see `compiled_call`."""
        return Case(self.name, "benchmarks.gpu_shapes:compiled_call", asdict(self))


_1B = partial(Row, model="1B", num_q_heads=4, num_kv_heads=1, head_dim=256)
_4B = partial(Row, model="4B", num_q_heads=8, num_kv_heads=4, head_dim=256)
_27B = partial(Row, model="27B", num_q_heads=32, num_kv_heads=16, head_dim=128)
_GPT_OSS = partial(Row, model="gpt-oss-like", num_q_heads=64, num_kv_heads=8, head_dim=64)

ROWS = (
    _4B(sliding_window=1024),
    _4B(page_size=128),
    _4B(sliding_window=1024, image_rule="clamp"),
    _4B(soft_cap=50.0, sinks=True, page_size=64),
    _27B(sliding_window=1024),
    _27B(page_size=128),
    _27B(soft_cap=30.0, page_size=32),
    _1B(sliding_window=512),
    _GPT_OSS(sliding_window=128, sinks=True),
    _GPT_OSS(soft_cap=50.0, page_size=128),
    Row(model="32 heads a group", num_q_heads=32, num_kv_heads=1, head_dim=128),
    Row(model="1 head a group", num_q_heads=8, num_kv_heads=8, head_dim=128, page_size=64),
    Row(model="head dim 80", num_q_heads=8, num_kv_heads=2, head_dim=80),
    Row(model="head dim 192", num_q_heads=8, num_kv_heads=2, head_dim=192, kv_dtype="int8"),
    *(
        layer(kv_dtype=kv_dtype, page_size=page_size)
        for kv_dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        for layer, page_size in ((_4B, 32), (_27B, 128), (_GPT_OSS, 32))
    ),
    _4B(kv_dtype="int8", soft_cap=50.0, sinks=True, sliding_window=1024, page_size=32),
    _1B(kv_dtype="float8_e4m3fn", sliding_window=512, page_size=128),
)


def arguments(row: Row, *, seqs: int, tokens: int, pool_tokens: int, table_tokens: int) -> tuple:
    """Shapes of a call's arrays, the optional ones behind the others."""

    def new(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, heads, row.head_dim), jnp.dtype(QUERY_DTYPE))

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    out: list[Any] = [
        *(new(row.num_q_heads), new(row.num_kv_heads), new(row.num_kv_heads)),
        row.layout.pages(pool_tokens // row.page_size + 1),
        *(integers(seqs), integers(seqs, table_tokens // row.page_size)),
        *(integers(seqs + 1), integers(3)),
    ]
    out += [jax.ShapeDtypeStruct((row.num_q_heads,), jnp.float32)] if row.sinks else []
    out += [integers(tokens, 2)] if row.image_rule != "none" else []
    return tuple(out)


def attention(row: Row, *arrays: Any, backend: str = BACKEND, **options: Any) -> Any:
    """The row's call, of arrays in the order of `arguments`."""
    arrays, optional = arrays[:8], list(arrays[8:])
    given = {"sinks": optional.pop(0)} if row.sinks else {}
    if row.image_rule != "none":
        given |= {"image_spans": optional.pop(0), "image_rule": row.image_rule}
    return ragged_paged_attention(
        *arrays,
        **given,
        sm_scale=row.sm_scale,
        sliding_window=row.sliding_window,
        soft_cap=row.soft_cap,
        backend=backend,
        **options,
    )


def compiled_call(
    target: Target, devices: tuple[Any, ...], **row: Any
) -> tuple[jax.stages.Wrapped, tuple]:
    """A jitted mixed batch of one row, its pages donated, and the shapes of its arguments."""
    made = Row(**row)
    sizes = {"seqs": SEQS, "tokens": TOKENS, "table_tokens": TABLE_TOKENS}
    call = jax.jit(partial(attention, made, target=target), donate_argnums=3)
    return call, arguments(made, pool_tokens=POOL_TOKENS, **sizes)
