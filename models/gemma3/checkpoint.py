"""From a GGUF file, a Hugging Face folder or our own to the model's weights, tensor by tensor.

All formats become one flat dict, named and shaped by `weight_table`. Every tensor of the file
is accounted for: what is missing, unexpected, wrongly shaped or not finite is listed in one error.
Blocks of rows are converted by a few threads, straight into their weight, which goes to its devices
as soon as it is whole, so that no model is in memory twice.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import ml_dtypes
import numpy as np

from jaxattn.models.gemma3.config import (
    CONFIGS,
    PADDED_VOCAB_SIZE,
    VOCAB_SIZE,
    Gemma3Config,
    from_gguf,
    from_hf,
)
from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.gguf import GGUFFile
from jaxattn.models.gemma3.huggingface import HuggingFaceFolder
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.quantize import quantize_rows
from jaxattn.models.gemma3.saved import SavedFolder
from jaxattn.models.gemma3.weights import SCALE, Quantization, weight_table

_BLOCK_BYTES = 8 * 2**20  # of float32, what a thread converts at a time
_THREADS = min(4, os.cpu_count() or 1)

WeightDtype = Literal["float32", "bfloat16"]
Progress = Callable[[int, int], None]  # (blocks of rows loaded, blocks in all)


class Checkpoint(Protocol):
    """What the loader needs of a format."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that the model may use, by the file's own name."""

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a tensor as float32, or int8 if stored so, in pieces (a vector is one row)."""


@dataclass(frozen=True)
class _Turned:
    """A tensor that a file stores with its axes in another order than `weight_table`."""

    stored: tuple[int, ...]  # its shape there
    axes: tuple[int, ...]  # to be transposed so, then reshaped


@dataclass(frozen=True)
class _Names:
    """A file's names for the canonical ones, and how it stores what it names."""

    of: dict[str, str]
    norm_offset: float  # 1 where the file stores 1 + w
    turned: dict[str, _Turned] = field(default_factory=dict)
    quantize: Quantization | None = None


def resolve_model(model: str) -> Path:
    """The file or folder of a known name, a GGUF file, a Hugging Face folder or one of ours."""
    if model == "gemma-3-270m":
        return packaged_gguf()
    path = Path(model).expanduser()
    if model and (path.is_file() or path.is_dir()):
        return path
    if model in CONFIGS:
        raise ValueError(
            f"{model!r} has no packaged weights (only 'gemma-3-270m' has): give the path of a "
            "GGUF file, a Hugging Face folder or one that `jaxattn convert` wrote"
        )
    raise ValueError(f"{model!r} is neither a file nor a folder nor a known name ('gemma-3-270m')")


def load_config(model: str, *, images: bool = True) -> Gemma3Config:
    """The config of a known name, or of a checkpoint, without its weights.

    `images=False`: without a vision tower. A GGUF file never has one.
    """
    if model in CONFIGS:
        return CONFIGS[model] if images else replace(CONFIGS[model], vision=None)
    if not Path(model).expanduser().exists():
        raise ValueError(f"{model!r} is neither a file nor a folder nor one of {list(CONFIGS)}")
    return _open(resolve_model(model), images)[1]


def load_weights(
    path: str | os.PathLike[str],
    *,
    dtype: WeightDtype,
    images: bool = True,
    quantize: Quantization | None = None,
    progress: Progress | None = None,
) -> tuple[Gemma3Config, dict[str, np.ndarray]]:
    """Config and weights of a checkpoint, on the host; see `stream_weights`."""
    return stream_weights(
        path,
        dtype=dtype,
        place=lambda _, weight: weight,
        images=images,
        quantize=quantize,
        progress=progress,
    )


def stream_weights[T](
    path: str | os.PathLike[str],
    *,
    dtype: WeightDtype,
    place: Callable[[str, np.ndarray], T],
    images: bool = True,
    quantize: Quantization | None = None,
    progress: Progress | None = None,
) -> tuple[Gemma3Config, dict[str, T]]:
    """Config of a checkpoint, and what `place(name, weight)` makes of each of its weights.

    Matrices come in `dtype`, norms, biases and scales in float32. `images=False`: the text model
    alone of a folder that also has a vision tower.

    `quantize="int8"` makes the matrices of the text model int8, block by block, each followed by
    its scales (see `weight_table`); they are int8 in any case if the checkpoint has them so.

    A weight is placed, in this thread, as soon as it is read, and not kept here: the host never
    holds more than the one that is placed and a few blocks of the next. Arrays begin on 64-byte
    boundaries: `jax.device_put` takes them on CPU without a copy.

    Raises CheckpointError, naming every tensor that is missing, unexpected, wrongly shaped or
    not finite, or for a damaged file; UnsupportedModelError for another model. Only a tensor that
    is not finite, or that cannot be decoded, is found after others were placed: these are dropped.
    """
    kept = _numpy_dtype(dtype)
    checkpoint, config, names = _open(Path(path), images)
    table = weight_table(config, check_quantization(quantize) or names.quantize)
    stored = {name: table[name].shape for name in names.of}
    stored |= {name: each.stored for name, each in names.turned.items()}
    _check_names(checkpoint, names, stored)
    blocks = [
        (name, rows)
        for name in table
        if name in names.of
        for rows in (
            [slice(0, stored[name][0])] if name in names.turned else _row_blocks(table[name].shape)
        )
    ]
    made = {  # of each tensor of the file: a matrix that is quantised here, and its scales
        name: [name, name + SCALE] if name + SCALE in table.keys() - names.of.keys() else [name]
        for name in names.of
    }
    weights: dict[str, np.ndarray] = {}  # those that are being read
    placed: dict[str, T] = {}
    not_finite = set()

    def fill(name: str, rows: slice) -> None:
        shape, turned = table[name].shape, names.turned.get(name)
        target = weights[name].reshape(-1, shape[-1])
        offset = np.float32(names.norm_offset if table[name].norm else 0)
        with np.errstate(all="ignore"):  # a damaged scale is reported below
            for where, values in checkpoint.rows(names.of[name], rows):
                if not np.isfinite(values).all():
                    not_finite.add(names.of[name])
                if turned is not None:  # read whole
                    target[:] = values.transpose(turned.axes).reshape(shape)
                elif target.dtype == np.int8 and values.dtype != np.int8:
                    target[where], weights[name + SCALE][where] = quantize_rows(values)
                else:
                    target[where] = values - offset if offset else values

    def begin(name: str, rows: slice) -> Future[None]:
        if rows.start == 0:
            for each in made[name]:
                weights[each] = _aligned(table[each].shape, np.dtype(table[each].kept(kept)))
        return pool.submit(fill, name, rows)

    with ThreadPoolExecutor(_THREADS) as pool:
        begun: deque[Future[None]] = deque()
        try:
            for count, (name, _) in enumerate(blocks, start=1):
                while len(begun) < 4 * _THREADS and count + len(begun) <= len(blocks):
                    begun.append(begin(*blocks[count + len(begun) - 1]))
                begun.popleft().result()
                if count == len(blocks) or blocks[count][0] != name:  # its last block
                    for each in made[name]:
                        weight = weights.pop(each)
                        if not not_finite:
                            placed[each] = place(each, weight)
                        del weight
                if not_finite:
                    placed.clear()  # the rest is read only to name what else is damaged
                if progress is not None:
                    progress(count, len(blocks))
        except BaseException:  # also Ctrl-C: do not load the rest first
            placed.clear()
            pool.shutdown(cancel_futures=True)
            raise
    if not_finite:
        raise CheckpointError(f"{path}: NaN or infinity in {', '.join(sorted(not_finite))}")
    return config, placed


def check_quantization(quantize: str | None) -> Quantization | None:
    """The same, or ValueError."""
    if quantize is not None and quantize not in get_args(Quantization):
        raise ValueError(f"{quantize=}: expected None or one of {get_args(Quantization)}")
    return quantize  # type: ignore[return-value]


def _numpy_dtype(name: str) -> np.dtype:
    if name not in get_args(WeightDtype):
        raise ValueError(f"dtype={name!r}: weights are kept in one of {get_args(WeightDtype)}")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float32)


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """A tensor's rows in steps of about `_BLOCK_BYTES`; a vector is one row."""
    num_rows = prod(shape[:-1])
    step = max(1, _BLOCK_BYTES // (4 * shape[-1]))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array on a 64-byte boundary."""
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _open(path: Path, images: bool) -> tuple[Checkpoint, Gemma3Config, _Names]:
    if SavedFolder.is_at(path):
        saved = SavedFolder(path, images=images)
        same = {name: name for name in weight_table(saved.config, saved.quantize)}
        return saved, saved.config, _Names(same, 0.0, quantize=saved.quantize)
    if path.is_dir():
        folder = HuggingFaceFolder(path, images=images)
        config = _config_of(path, partial(from_hf, images=images), folder.config)
        names = _huggingface_names(config, folder.prefix)
        names |= _vision_names(config, folder.tower_prefix, folder.projector_prefix)
        return folder, config, _Names(names, 0.0, _turned_vision(config))
    file = GGUFFile(path)
    config = _config_of(path, from_gguf, file.metadata)
    return file, config, _Names(_gguf_names(config), 1.0)


def _config_of(
    path: Path, read: Callable[[dict[str, Any]], Gemma3Config], stored: dict[str, Any]
) -> Gemma3Config:
    try:
        return read(stored)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path} describes no possible model: {error}") from error


def _check_names(checkpoint: Checkpoint, names: _Names, shapes: dict[str, tuple[int, ...]]) -> None:
    found = dict(checkpoint.shapes())
    problems = []
    for name, shape in shapes.items():
        stored = found.pop(names.of[name], None)
        if stored is None:
            problems.append(f"missing: {names.of[name]}")
        elif stored != shape and not (name == "embed" and _is_padded(stored, shape)):
            problems.append(f"wrong shape: {names.of[name]} is {stored}, expected {shape}")
    problems += [f"unexpected: {name} {shape}" for name, shape in found.items()]
    if problems:
        listed = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit its config:\n  {listed}{more}")


def _is_padded(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Multimodal checkpoints have 64 unused rows at the end of the embedding: not read."""
    return shape[0] == VOCAB_SIZE and stored == (PADDED_VOCAB_SIZE, *shape[1:])


def _gguf_names(config: Gemma3Config) -> dict[str, str]:
    layer = {
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "post_attn_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    }
    names = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
    for index in range(config.num_layers):
        names |= {
            f"layers.{index}.{ours}": f"blk.{index}.{theirs}.weight"
            for ours, theirs in layer.items()
        }
    return names


def _huggingface_names(config: Gemma3Config, prefix: str) -> dict[str, str]:
    layer = {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    names = {"embed": f"{prefix}embed_tokens.weight", "final_norm": f"{prefix}norm.weight"}
    for index in range(config.num_layers):
        names |= {
            f"layers.{index}.{ours}": f"{prefix}layers.{index}.{theirs}.weight"
            for ours, theirs in layer.items()
        }
    return names


def _vision_names(config: Gemma3Config, tower: str, projector: str) -> dict[str, str]:
    if config.vision is None:
        return {}
    modules = {
        "patch": "embeddings.patch_embedding",
        "final_norm": "post_layernorm",
    }
    layer = {
        "attn_norm": "layer_norm1",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }
    for index in range(config.vision.num_layers):
        modules |= {
            f"layers.{index}.{ours}": f"encoder.layers.{index}.{theirs}"
            for ours, theirs in layer.items()
        }
    names = {f"vision.{ours}": f"{tower}{theirs}.weight" for ours, theirs in modules.items()}
    names |= {f"vision.{ours}_bias": f"{tower}{theirs}.bias" for ours, theirs in modules.items()}
    return names | {
        "vision.positions": f"{tower}embeddings.position_embedding.weight",
        "projector.norm": f"{projector}mm_soft_emb_norm.weight",
        "projector.out": f"{projector}mm_input_projection_weight",
    }


def _turned_vision(config: Gemma3Config) -> dict[str, _Turned]:
    """The convolution over patches is `[out, 3, height, width]`, the projection `[in, out]`."""
    if config.vision is None:
        return {}
    vision = config.vision
    patch = (vision.embed_dim, 3, vision.patch_size, vision.patch_size)
    return {
        "vision.patch": _Turned(patch, (0, 2, 3, 1)),
        "projector.out": _Turned((vision.embed_dim, config.embed_dim), (1, 0)),
    }
