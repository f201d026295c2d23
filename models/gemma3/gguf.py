"""Reading GGUF: a header parser that is quick on large vocabularies, and block-wise tensors.

`gguf.GGUFReader` makes several Python objects for every token of the vocabulary, which takes
seconds; here an array of metadata is read in one pass. Types, block sizes and dequantisation are
the `gguf` library's. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import QuantError, dequantize, quant_shape_to_byte_shape

from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.finite import all_finite

_ALIGNMENT = 32  # unless `general.alignment` says otherwise
_PIECE_BYTES = 2**19  # of float32: temporaries stay in a core's cache; at 2 MiB twice as slow
_MAX_AXES = 4  # of ggml
_VISION = ("v.", "mm.")  # begin the names of a vision tower's tensors and of its projector's
_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is and how it is stored. `shape` is row-major: `[rows, columns]`."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row."""
        return quant_shape_to_byte_shape(self.shape[-1:], self.kind)[0]

    @property
    def num_rows(self) -> int:
        """Rows of the last axis."""
        return prod(self.shape[:-1])

    @property
    def end(self) -> int:
        """Where the stored bytes end, from the start of the file."""
        return self.offset + self.num_rows * self.row_bytes


class GGUFFile:
    """A GGUF file's metadata and tensors. Reads the header; tensors are read when asked for.

    A vision tower inside (Ollama's files of 4B and up have one) is passed over: images are never
    taken from GGUF, they need a Hugging Face folder.

    Raises CheckpointError for a file that is not GGUF, is truncated, is of another version, or
    holds tensors of a type that cannot be dequantised.
    """

    heads: tuple[str, ...] = ("output.weight",)  # some files repeat the embedding

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            try:
                self.metadata, self.tensors = _read_header(_Reader(file, size))
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from None
            except (EOFError, ValueError) as error:
                raise CheckpointError(f"{path}: the GGUF header is damaged ({error})") from error
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {parts} parts: join them into one file "
                "(llama-gguf-split --merge)"
            )
        for tensor in self.tensors.values():
            if tensor.end > size:
                raise CheckpointError(
                    f"{path} is truncated: tensor {tensor.name!r} ends at byte {tensor.end}, the "
                    f"file at {size}; fetch or copy it again"
                )
        in_order = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for first, second in pairwise(in_order):
            if first.end > second.offset:
                raise CheckpointError(f"{path}: {first.name!r} and {second.name!r} overlap")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that is not passed over."""
        return {
            name: tensor.shape
            for name, tensor in self.tensors.items()
            if not name.startswith(_VISION)
        }

    def is_finite(self, name: str, rows: slice) -> bool:
        """Whether rows of a tensor hold neither NaN nor infinity."""
        scales = _scales(self.tensors[name].kind)
        if scales is None:
            with np.errstate(all="ignore"):  # NaN is reported otherwise
                return all(all_finite(values) for _, values in self.rows(name, rows))
        return all(
            all_finite(stored.view(scales)[scale])
            for _, stored in self._stored(name, rows)
            for scale in scales.names or ()
        )

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a tensor as float32, in pieces: `(rows, values[rows, columns])`."""
        tensor = self.tensors[name]
        for piece, stored in self._stored(name, rows):
            # One long row: the library converts 16 rows at a time, here too few to be quick.
            yield piece, dequantize(stored[None], tensor.kind).reshape(-1, tensor.shape[-1])

    def _stored(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """The bytes of rows, in pieces."""
        tensor = self.tensors[name]
        step = max(1, _PIECE_BYTES // (4 * tensor.shape[-1]))
        with self.path.open("rb") as file:
            file.seek(tensor.offset + rows.start * tensor.row_bytes)
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                raw = file.read((stop - start) * tensor.row_bytes)
                if len(raw) < (stop - start) * tensor.row_bytes:
                    raise CheckpointError(f"{self.path} became shorter while it was read")
                yield slice(start, stop), np.frombuffer(raw, np.uint8)


@cache
def _scales(kind: GGMLQuantizationType) -> np.dtype | None:
    """A block of this type, with a field for each float16 that can make its values NaN.

    The library is asked: a float16 NaN at every place of a block of zeros shows where they are.
    None if anything else can make NaN or infinity too, as in plain bfloat16 or float32: tried with
    the largest number in each scale and every byte in the rest.
    """
    size = GGML_QUANT_SIZES[kind][1]
    one_nan = np.zeros((size - 1, size), np.uint8)
    every_byte = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1)
    with np.errstate(all="ignore"):
        for place, block in enumerate(one_nan):
            block[place : place + 2] = _bytes_of(np.nan)
        finite = np.isfinite(dequantize(one_nan, kind)).all(axis=1)
        places = np.flatnonzero(~finite).tolist()
        for place in places:
            every_byte[:, place : place + 2] = _bytes_of(float(np.finfo(np.float16).max))
        if not np.isfinite(dequantize(every_byte, kind)).all():
            return None
    names, formats = [f"at_{place}" for place in places], ["<f2"] * len(places)
    return np.dtype({"names": names, "formats": formats, "offsets": places, "itemsize": size})


def _bytes_of(number: float) -> np.ndarray:
    """A float16 as two bytes."""
    return np.array([number], "<f2").view(np.uint8)


class _Reader:
    """Reads a header's values in order, and never more than the file has left."""

    def __init__(self, file: BinaryIO, size: int):
        self._file = file
        self.left = size

    @property
    def offset(self) -> int:
        """Bytes from the start of the file."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        if size > self.left:
            raise EOFError(f"{size} bytes expected at byte {self.offset}, {self.left} are left")
        self.left -= size
        return self._file.read(size)

    def number(self, kind: str) -> Any:
        return self.array(kind, 1)[0].item()

    def array(self, kind: str, count: int) -> np.ndarray:
        dtype = np.dtype(kind)
        return np.frombuffer(self.read(count * dtype.itemsize), dtype)

    def strings(self, count: int) -> list[str]:
        found, read = [], self._file.read  # in place of self.read: half a million calls
        for _ in range(count):
            size = int.from_bytes(read(8), "little")
            self.left -= 8 + size
            if self.left < 0:
                raise EOFError(f"a string of {size} bytes at byte {self.offset} is beyond the end")
            found.append(read(size).decode("utf-8", "replace"))
        return found

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self) -> Any:
        """A metadata value: its type, then itself; an array has its elements' type and a count."""
        kind = GGUFValueType(self.number("<u4"))
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_NUMBERS[kind])
        element, count = GGUFValueType(self.number("<u4")), self.number("<u8")
        if element is GGUFValueType.STRING:
            return self.strings(count)
        if element is GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        return self.array(_NUMBERS[element], count)


def _read_header(reader: _Reader) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    magic = reader.read(min(4, reader.left))
    if magic != b"GGUF":
        raise CheckpointError(f"this is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = reader.number("<u4")
    if version not in (2, 3):
        raise CheckpointError(f"GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_entries = reader.number("<u8"), reader.number("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"two entries are called {key!r}")
        metadata[key] = reader.value()
    found = [_tensor(reader) for _ in range(num_tensors)]
    tensors = {tensor.name: tensor for tensor in found}
    if len(tensors) != len(found):
        raise ValueError("two tensors have one name")
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r}: expected a positive number of bytes")
    data = -(-reader.offset // alignment) * alignment  # offsets are counted from here
    return metadata, {
        name: replace(tensor, offset=data + tensor.offset) for name, tensor in tensors.items()
    }


def _tensor(reader: _Reader) -> GGUFTensor:
    name, num_axes = reader.string(), reader.number("<u4")
    if not 1 <= num_axes <= _MAX_AXES:
        raise ValueError(f"tensor {name!r} has {num_axes} axes, expected 1 to {_MAX_AXES}")
    shape = tuple(reader.array("<u8", num_axes).tolist())[::-1]
    kind, offset = _dequantisable(name, reader.number("<u4")), reader.number("<u8")
    block, _ = GGML_QUANT_SIZES[kind]
    if prod(shape) == 0 or shape[-1] % block:
        raise ValueError(
            f"tensor {name!r} has shape {shape}; {kind.name} is stored in blocks of {block}"
        )
    return GGUFTensor(name, shape, kind, offset)


def _dequantisable(name: str, number: int) -> GGMLQuantizationType:
    """The type with this number, if tensors of it can be read."""
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(
            f"tensor {name!r} is of type {number}, which the gguf library does not know"
        ) from None
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, QuantError):
        raise CheckpointError(
            f"the gguf library cannot dequantise {name} ({kind.name}); use a file of another type, "
            "such as Q8_0, Q4_K_M, BF16, F16 or F32"
        ) from None
    return kind
