"""An engine on a TPU slice that is not here: what fits, into how many bytes, and a bound on speed.

The engine's own plan and the engine's own step, from shapes alone. What the compiler says of the
step is the compiler's; nothing runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxattn.cache.plan import CachePlan
from jaxattn.cache.sizing import capacity, worst_demand
from jaxattn.engine.ahead import Case, Compiled, CompilerError, compile_ahead
from jaxattn.engine.devices import CACHE_SHARE, mesh_of, sharding_of
from jaxattn.engine.engine import plan_engine, table_widths
from jaxattn.engine.image_encoder import ImageEncoder
from jaxattn.engine.program import Program
from jaxattn.engine.slices import SLICES, Slice, slice_of
from jaxattn.models.gemma3.checkpoint import load_config, load_quantization
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import abstract_weights, shared_config
from jaxattn.models.gemma3.weights import VISION, Quantization
from jaxattn.registry import Target, UnsupportedAttentionError
from jaxattn.sharding import DATA, HEADS
from jaxattn.spec import check_positive_int

BACKEND = "pallas_tpu"  # said, so that nothing else is compiled in its place
_IMAGE = "image"  # the case that computes the embeddings of one


class DoesNotFitError(ValueError):
    """A model, with a cache for one sequence, is too large for the slice."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for: a model as `load_config` takes it, and the engine's options.

    `batch`: sequences that run at a time, on each replica; `prefill_tokens`: most tokens of a
    step. `images`: with the vision tower, if the model has one. `layers`: only so many of the
    model's, for tests.
    """

    model: str
    max_len: int
    batch: int
    page_size: int = 32
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    prefill_tokens: int = 512
    quantize: Quantization | None = None
    images: bool = True
    layers: int | None = None

    def config(self) -> Gemma3Config:
        """The model's config, without its weights."""
        config = load_config(self.model, images=self.images)
        return replace(config, layers=config.layers[: self.layers])

    @property
    def quantization(self) -> Quantization | None:
        """What is asked for, else what the checkpoint has."""
        return self.quantize or load_quantization(self.model)

    def engine_plan(
        self, target: Target, tensor_parallel: int, memory: int | None = None
    ) -> tuple[CachePlan, tuple[int, ...]]:
        """The engine's cache plan and pools, of `memory` bytes on each device."""
        return plan_engine(
            self.config(),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            max_model_len=self.max_len,
            max_num_seqs=self.batch,
            max_num_batched_tokens=self.prefill_tokens,
            memory=None if memory is None else memory * tensor_parallel,
            tensor_parallel=tensor_parallel,
            target=target,
            backend=BACKEND,
        )


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """An engine on a slice. Bytes are those of one device."""

    wanted: Wanted
    slice: Slice
    tensor_parallel: int
    cache: CachePlan
    num_pages: tuple[int, ...]
    weight_bytes: int
    tower_bytes: int  # of these, the vision tower's
    memory: int  # that the cache was given

    @property
    def data_parallel(self) -> int:
        """Replicas, each with a cache and a batch of its own."""
        return self.slice.num_devices // self.tensor_parallel

    def pool_bytes(self, group: int) -> int:
        """Of one group's pool."""
        return self.num_pages[group] * self.cache.page_bytes(group) // self.tensor_parallel

    def sequences(self, length: int) -> int:
        """How many sequences of `length` tokens run at a time, on each replica."""
        held = capacity(
            self.cache, self.num_pages, length=length, step_tokens=self.wanted.prefill_tokens
        )
        return min(held, self.wanted.batch)

    def decode_seconds(self, length: int) -> float:
        """The least time of a decode step of `sequences(length)` of `length` tokens each.

        A bound: every weight of the text model and every key and value that a query sees is read
        once, at the full bandwidth of the memory. Exchanges between devices and all computing are
        left out.
        """
        visible = self.sequences(length) * self.cache.ideal_bytes(length) / self.tensor_parallel
        weights = self.weight_bytes - self.tower_bytes
        return (weights + visible) / (self.slice.hbm_gb_per_s * 1e9)

    def most_tokens_per_s(self, length: int) -> float:
        """What `decode_seconds` leaves room for, over all replicas."""
        return self.data_parallel * self.sequences(length) / self.decode_seconds(length)

    def cases(self) -> list[Case]:
        """The engine's decode step of a whole batch, and its largest step; with a vision tower that
        step has images, and a third case computes an image's embeddings."""
        images = self.tower_bytes > 0
        options = vars(self.wanted) | {"tensor_parallel": self.tensor_parallel}

        def step(name: str, tokens: int, *, with_images: bool = False) -> Case:
            own = {"memory": self.memory, "tokens": tokens, "with_images": with_images}
            return Case(name, f"{__name__}:engine_step", options | own)

        cases = [
            step("decode", self.wanted.batch),
            step("prefill", self.wanted.prefill_tokens, with_images=images),
        ]
        if images:
            cases.append(Case(_IMAGE, f"{__name__}:engine_encoder", options))
        return cases

    def compile(self, seconds: float = 3600) -> list[Compiled]:
        """Compile the cases; DoesNotFitError if the compiler finds one too large.

        Raises LibtpuMissingError without libtpu, CompilerError where the compiler fails otherwise.
        """
        steps = compile_ahead(self.slice.topology, self.cases(), seconds_per_case=seconds)
        for each in steps:
            needs = self.device_bytes(each)
            if "Ran out of memory" in each.error or needs > self.slice.hbm_bytes:
                raise DoesNotFitError(
                    f"the {each.case} step does not fit a chip of {self.slice.name} beside "
                    f"{gib(self.weight_bytes)} of weights and {gib(self.memory)} of cache: "
                    f"{each.error or gib(needs)}; give fewer --prefill-tokens, or a "
                    "smaller --batch"
                )
            if each.error:
                raise CompilerError(f"the {each.case} step did not compile: {each.error}")
        return steps

    @property
    def resident_bytes(self) -> int:
        """What is on a device all the time: the weights and the cache."""
        return self.weight_bytes + sum(map(self.pool_bytes, range(len(self.num_pages))))

    def device_bytes(self, step: Compiled) -> int:
        """All that is in a device's memory while a step runs."""
        in_place = step.output_bytes - step.alias_bytes
        own = self.other_bytes(step) + in_place + step.temp_bytes + step.code_bytes
        return self.resident_bytes + own

    def other_bytes(self, step: Compiled) -> int:
        """Of a step's arguments, those that are not on the device all the time; and padding."""
        tower = self.tower_bytes
        taken = tower if step.case == _IMAGE else self.resident_bytes - tower
        return step.argument_bytes - taken


def plan_target(
    wanted: Wanted,
    target: str,
    *,
    tensor_parallel: int | None = None,
    data_parallel: int | None = None,
) -> TargetPlan:
    """The engine that `wanted` makes on a slice such as "v5e-8"; nothing is compiled.

    With neither number given, a replica has the fewest devices whose cache holds `wanted.batch`
    sequences of `wanted.max_len`; if there are none, as many as can share the model. The cache
    gets 9 tenths of what the weights leave, as in `LLM`.

    Raises DoesNotFitError, with what would; UnsupportedAttentionError where the kernels cannot
    serve the layers; ValueError for options that are wrong in themselves.
    """
    where = slice_of(target)
    sizes = _sizes(where, wanted.config(), tensor_parallel, data_parallel)
    plan = _best(wanted, where, sizes)
    if plan is None:
        raise DoesNotFitError(_why_not(wanted, where, sizes[-1]))
    return plan


def _best(wanted: Wanted, where: Slice, sizes: Sequence[int]) -> TargetPlan | None:
    """With the first size whose cache holds the batch, else the last that fits at all."""
    best = None
    for size in sizes:
        try:
            plan = _plan(wanted, where, size)
        except UnsupportedAttentionError:  # too many heads for one chip
            if size == sizes[-1] and best is None:
                raise
            continue
        best = plan or best
        if plan is not None and plan.sequences(wanted.max_len) >= wanted.batch:
            break
    return best


def _sizes(
    where: Slice, config: Gemma3Config, tensor_parallel: int | None, data_parallel: int | None
) -> list[int]:
    """The values of `tensor_parallel` to try, rising; those that cannot share are left out."""
    for name, value in (("tensor_parallel", tensor_parallel), ("data_parallel", data_parallel)):
        if value is not None:
            check_positive_int(name, value)
    devices = where.num_devices
    if tensor_parallel is None and data_parallel is None:
        return [
            size for size in range(1, devices + 1) if not devices % size and _fits(config, size)
        ]
    size = tensor_parallel or devices // (data_parallel or 1)
    replicas = data_parallel or devices // size
    if size * replicas != devices:
        raise ValueError(
            f"{tensor_parallel=}, {data_parallel=}: {where.name} has {devices} devices, which the "
            "product of both must be"
        )
    shared_config(config, size)
    return [size]


def _fits(config: Gemma3Config, size: int) -> bool:
    try:
        shared_config(config, size)
    except ValueError:
        return False
    return True


def _plan(wanted: Wanted, where: Slice, size: int) -> TargetPlan | None:
    """With `size` devices a replica; None where not even one sequence fits."""
    by_name = weight_bytes(wanted, size)
    weights = sum(by_name.values())
    memory = int(CACHE_SHARE * (where.hbm_bytes - weights))
    if memory < least_cache_bytes(wanted, where, size):
        return None
    cache, num_pages = wanted.engine_plan(where.target, size, memory)
    return TargetPlan(
        wanted=wanted,
        slice=where,
        tensor_parallel=size,
        cache=cache,
        num_pages=num_pages,
        weight_bytes=weights,
        tower_bytes=sum(each for name, each in by_name.items() if name.startswith(VISION)),
        memory=memory,
    )


def weight_bytes(wanted: Wanted, size: int) -> dict[str, int]:
    """Bytes of each weight on each of `size` devices that share them."""
    config = shared_config(wanted.config(), size)
    mesh = AbstractMesh((1, size), (DATA, HEADS))
    leaves = abstract_weights(config, wanted.dtype, mesh, wanted.quantization)
    return {
        name: prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for name, leaf in leaves.items()
    }


def least_cache_bytes(wanted: Wanted, where: Slice, size: int) -> int:
    """Bytes on each device of a cache for one sequence of the greatest length."""
    cache, _ = wanted.engine_plan(where.target, size)
    limits = {"max_len": wanted.max_len, "step_tokens": wanted.prefill_tokens}
    pages = worst_demand(cache, max_num_seqs=1, **limits)
    return sum((1 + n) * cache.page_bytes(group) for group, n in enumerate(pages)) // size


def _why_not(wanted: Wanted, where: Slice, size: int) -> str:
    """Why a model does not fit `size` devices, and where it would."""
    weights, whole = (sum(weight_bytes(wanted, each).values()) for each in (size, 1))
    chip = f"a chip of {where.name} has {gib(where.hbm_bytes)}"
    stored = wanted.quantization or wanted.dtype
    needs = f"{wanted.model} in {stored} needs {gib(whole)} for its weights"
    if size > 1:
        needs += f", {gib(weights)} on each of {size} chips"
    others = [other.name for other in SLICES.values() if _would_fit(wanted, other)]
    do = f"use --target {', '.join(others)}" if others else "none of the targets has more"
    if where.name in others:  # shared otherwise
        return f"{needs}; {chip}: leave out --tensor-parallel and --data-parallel"
    if wanted.quantization is None and _would_fit(replace(wanted, quantize="int8"), where):
        do += ", or --quantize int8"
    if wanted.images and _would_fit(replace(wanted, images=False), where):
        do += ", or --no-images"
    if weights >= where.hbm_bytes:
        return f"{needs}; {chip}: {do}"
    return (
        f"{needs}, and {gib(least_cache_bytes(wanted, where, size))} for the cache of one sequence "
        f"of {wanted.max_len:,} tokens; {chip}, of which a cache gets "
        f"{gib(max(0, int(CACHE_SHARE * (where.hbm_bytes - weights))))}: {do}, or a smaller "
        "--max-len"
    )


def _would_fit(wanted: Wanted, where: Slice) -> bool:
    try:
        return _plan(wanted, where, _sizes(where, wanted.config(), None, None)[-1]) is not None
    except UnsupportedAttentionError:
        return False


def gib(num_bytes: float) -> str:
    """Such as "15.75 GiB"."""
    return f"{num_bytes / 2**30:.2f} GiB"


def engine_step(
    target: Target,
    devices: Sequence[Any],
    *,
    tensor_parallel: int,
    memory: int,
    tokens: int,
    with_images: bool = False,
    **wanted: Any,
) -> tuple[jax.stages.Wrapped, tuple, dict[str, int]]:
    """The engine's step of `tokens` tokens on all of these devices, for `compile_ahead`."""
    asked = Wanted(**wanted)
    plan, num_pages = asked.engine_plan(target, tensor_parallel, memory)
    model, mesh = _abstract_model(asked, devices, tensor_parallel)
    program = Program(
        model,
        plan,
        num_pages=num_pages,
        widths=table_widths(plan, asked.max_len, asked.prefill_tokens),
        max_num_seqs=asked.batch,
        backend=BACKEND,
        mesh=mesh,
        device=devices[0],
        target=target,
    )
    return program.step, program.arguments(tokens, images=with_images), {"num_tokens": tokens}


def engine_encoder(
    target: Target, devices: Sequence[Any], *, tensor_parallel: int, **wanted: Any
) -> tuple[jax.stages.Wrapped, tuple]:
    """What computes the embeddings of one image on every replica, for `compile_ahead`."""
    model, mesh = _abstract_model(Wanted(**wanted), devices, tensor_parallel)
    assert model.vision is not None
    sharding = sharding_of(mesh, devices[0], PartitionSpec(DATA))
    encoder = ImageEncoder(model.vision, mesh=mesh, sharding=sharding)
    return encoder.encode, encoder.arguments()


def _abstract_model(
    wanted: Wanted, devices: Sequence[Any], tensor_parallel: int
) -> tuple[Gemma3, Mesh | None]:
    """The model with shapes for weights, and the mesh that they are cut over."""
    config = shared_config(wanted.config(), tensor_parallel)
    mesh = None if len(devices) == 1 else mesh_of(devices, tensor_parallel=tensor_parallel)
    weights: Any = abstract_weights(config, wanted.dtype, mesh, wanted.quantization)
    return Gemma3(config, weights, wanted.dtype), mesh
