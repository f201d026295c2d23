"""From a GGUF file, a Hugging Face folder or our own to the model's weights, tensor by tensor.

All formats become one flat dict, named and shaped by `weight_table`. Every tensor of the file
is accounted for: what is missing, unexpected, wrongly shaped or not finite is listed in one error
before anything goes to a device. For this the values are read twice, first to be checked as they
are stored. Then blocks of rows are converted by a few threads, straight into their weight, which
goes to its devices as soon as it is whole, so that no model is in memory twice.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
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
from jaxattn.models.gemma3.names import (
    Names,
    gguf_names,
    huggingface_names,
    turned_vision,
    vision_names,
)
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.quantize import quantize_rows
from jaxattn.models.gemma3.saved import SavedFolder
from jaxattn.models.gemma3.weights import SCALE, Quantization, weight_table

_BLOCK_BYTES = 8 * 2**20  # of float32, what a thread converts at a time
_THREADS = min(4, os.cpu_count() or 1)

WeightDtype = Literal["float32", "bfloat16"]
Progress = Callable[[int, int], None]  # (blocks of rows checked or loaded, both in all)
_Block = tuple[str, slice]  # a weight, and some of its rows as they are stored


class Checkpoint(Protocol):
    """What the loader needs of a format."""

    path: Path
    heads: tuple[str, ...]  # what a head may be called, which must be the embedding

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that the model may use, by the file's own name."""

    def is_finite(self, name: str, rows: slice) -> bool:
        """Whether rows of a tensor hold neither NaN nor infinity; they are not kept."""

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a tensor as float32, or int8 if stored so, in pieces (a vector is one row)."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """With the home folder for `~`. Raises ValueError for that of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def resolve_model(model: str) -> Path:
    """The file or folder of a known name, a GGUF file, a Hugging Face folder or one of ours."""
    if model == "gemma-3-270m":
        return packaged_gguf()
    path = expanded(model)
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
    if not expanded(model).exists():
        raise ValueError(f"{model!r} is neither a file nor a folder nor one of {list(CONFIGS)}")
    return _open(resolve_model(model), images)[1]


def load_quantization(model: str) -> Quantization | None:
    """How the weights of a checkpoint are quantised as they are stored: ours may be."""
    path = expanded(model)
    return SavedFolder(path).quantize if SavedFolder.is_at(path) else None


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
    not finite, for a head that is not the embedding, or for a damaged file; UnsupportedModelError
    for another model. Nothing was placed then. Should the file be changed while it is loaded, what
    was placed is dropped.
    """
    kept = _numpy_dtype(dtype)
    checkpoint, config, names = _open(Path(path), images)
    table = weight_table(config, check_quantization(quantize) or names.quantize)
    stored = {name: table[name].shape for name in names.of}
    stored |= {name: each.stored for name, each in names.turned.items()}
    heads = _check_names(checkpoint, names, stored)
    blocks: list[_Block] = [
        (name, rows)
        for name in table
        if name in names.of
        for rows in (
            [slice(0, stored[name][0])] if name in names.turned else _row_blocks(table[name].shape)
        )
    ]
    _check_values(checkpoint, names, heads, blocks, progress)
    made = {  # of each tensor of the file: a matrix that is quantised here, and its scales
        name: [name, name + SCALE] if name + SCALE in table.keys() - names.of.keys() else [name]
        for name in names.of
    }
    weights: dict[str, np.ndarray] = {}  # those that are being read
    placed: dict[str, T] = {}

    def fill(name: str, rows: slice) -> None:
        shape, turned = table[name].shape, names.turned.get(name)
        target = weights[name].reshape(-1, shape[-1])
        offset = np.float32(names.norm_offset if table[name].norm else 0)
        for where, values in checkpoint.rows(names.of[name], rows):
            if turned is not None:  # read whole
                target[:] = values.transpose(turned.axes).reshape(shape)
            elif target.dtype == np.int8 and values.dtype != np.int8:
                target[where], weights[name + SCALE][where] = quantize_rows(values)
            else:
                target[where] = values - offset if offset else values

    def tasks() -> Iterator[Callable[[], None]]:
        for name, rows in blocks:
            if rows.start == 0:
                for each in made[name]:
                    weights[each] = _aligned(table[each].shape, np.dtype(table[each].kept(kept)))
            yield partial(fill, name, rows)

    try:
        with closing(_in_order(tasks())) as filled:
            for count, _ in enumerate(filled, start=1):
                name = blocks[count - 1][0]
                if count == len(blocks) or blocks[count][0] != name:  # its last block
                    for each in made[name]:
                        placed[each] = place(each, weights.pop(each))
                if progress is not None:
                    progress(len(blocks) + count, 2 * len(blocks))
    except BaseException:
        placed.clear()
        raise
    return config, placed


def _check_values(
    checkpoint: Checkpoint,
    names: Names,
    heads: list[str],
    blocks: list[_Block],
    progress: Progress | None,
) -> None:
    """Raise CheckpointError for a head that is not the embedding, or values that are not finite."""

    def is_finite(name: str, rows: slice) -> bool:
        finite = checkpoint.is_finite(names.of[name], rows)
        for head in heads if finite and name == "embed" else ():
            _check_head(checkpoint, names.of[name], head, rows)
        return finite

    not_finite = set()
    with closing(_in_order(partial(is_finite, *block) for block in blocks)) as found:
        for count, finite in enumerate(found, start=1):
            if not finite:
                not_finite.add(names.of[blocks[count - 1][0]])
            if progress is not None:
                progress(count, 2 * len(blocks))
    if not_finite:
        raise CheckpointError(
            f"{checkpoint.path}: NaN or infinity in {', '.join(sorted(not_finite))}"
        )


def _check_head(checkpoint: Checkpoint, embed: str, head: str, rows: slice) -> None:
    pieces = zip(checkpoint.rows(embed, rows), checkpoint.rows(head, rows), strict=True)
    if not all(np.array_equal(one, other, equal_nan=True) for (_, one), (_, other) in pieces):
        raise CheckpointError(
            f"{checkpoint.path}: {head} differs from {embed} in rows {rows.start} to {rows.stop}: "
            "only a head that is the embedding is implemented"
        )


def _in_order[T](tasks: Iterable[Callable[[], T]]) -> Generator[T]:
    """What tasks return, in their order; a few threads are a few tasks ahead.

    To be closed: on an error, also Ctrl-C, those that are not begun are dropped.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        begun: deque[Future[T]] = deque()
        try:
            for task in tasks:
                begun.append(pool.submit(task))
                if len(begun) == 4 * _THREADS:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


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


def _open(path: Path, images: bool) -> tuple[Checkpoint, Gemma3Config, Names]:
    if SavedFolder.is_at(path):
        saved = SavedFolder(path, images=images)
        same = {name: name for name in weight_table(saved.config, saved.quantize)}
        return saved, saved.config, Names(same, 0.0, quantize=saved.quantize)
    if path.is_dir():
        folder = HuggingFaceFolder(path, images=images)
        config = _config_of(path, partial(from_hf, images=images), folder.config)
        names = huggingface_names(config, folder.prefix)
        names |= vision_names(config, folder.tower_prefix, folder.projector_prefix)
        return folder, config, Names(names, 0.0, turned_vision(config))
    file = GGUFFile(path)
    config = _config_of(path, from_gguf, file.metadata)
    return file, config, Names(gguf_names(config), 1.0)


def _config_of(
    path: Path, read: Callable[[dict[str, Any]], Gemma3Config], stored: dict[str, Any]
) -> Gemma3Config:
    try:
        return read(stored)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path} describes no possible model: {error}") from error


def _check_names(
    checkpoint: Checkpoint, names: Names, shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """Raise CheckpointError for tensors that are not what they should be; the heads there are."""
    found = dict(checkpoint.shapes())
    heads = [name for name in checkpoint.heads if name in found]
    problems = []
    for name, shape in shapes.items():
        for theirs in [names.of[name], *(heads if name == "embed" else [])]:
            stored = found.pop(theirs, None)
            if stored is None:
                problems.append(f"missing: {theirs}")
            elif stored != shape and not (name == "embed" and _is_padded(stored, shape)):
                problems.append(f"wrong shape: {theirs} is {stored}, expected {shape}")
    problems += [f"unexpected: {name} {shape}" for name, shape in found.items()]
    if problems:
        listed = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit its config:\n  {listed}{more}")
    return heads


def _is_padded(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Multimodal checkpoints have 64 unused rows at the end of the embedding: not read."""
    return shape[0] == VOCAB_SIZE and stored == (PADDED_VOCAB_SIZE, *shape[1:])
