"""Reading GGUF: a header parser that is quick on large vocabularies, and block-wise tensors.

`gguf.GGUFReader` makes several Python objects for every token of the vocabulary, which takes
seconds; here an array of metadata is read in one pass. Types, block sizes and dequantisation are
the `gguf` library's. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import QuantError, dequantize

from jaxattn.models.gemma3.errors import CheckpointError

_ALIGNMENT = 32  # unless `general.alignment` says otherwise
_PIECE_BYTES = 2 * 2**20  # of float32: the temporaries of a piece stay in a core's cache
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
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        """Rows of the last axis."""
        return prod(self.shape[:-1])


class GGUFFile:
    """A GGUF file's metadata and tensors. Reads the header; tensors are read when asked for.

    Raises CheckpointError for a file that is not GGUF, is truncated, or is of another version.
    """

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            try:
                self.metadata, self.tensors = _read_header(file, path)
            except (EOFError, struct.error, ValueError, OverflowError, MemoryError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path}: the GGUF header is damaged ({error})") from error
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one of {self.metadata['split.count']} parts: join them into one file "
                "(llama-gguf-split --merge)"
            )
        unreadable = [
            f"{tensor.name} ({tensor.kind.name})"
            for tensor in self.tensors.values()
            if not _can_dequantise(tensor.kind)
        ]
        if unreadable:
            raise CheckpointError(
                f"{path}: the gguf library cannot dequantise {', '.join(unreadable)}; use a file "
                "of another type, such as Q8_0, Q4_K_M, BF16, F16 or F32"
            )
        for tensor in self.tensors.values():
            end = tensor.offset + tensor.num_rows * tensor.row_bytes
            if end > size:
                raise CheckpointError(
                    f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, the file at "
                    f"{size}; fetch or copy it again"
                )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the file."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a tensor as float32, in pieces: `(rows, values[rows, columns])`."""
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        step = max(1, _PIECE_BYTES // (4 * columns))
        with self.path.open("rb") as file:
            file.seek(tensor.offset + rows.start * tensor.row_bytes)
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                raw = _read(file, (stop - start) * tensor.row_bytes)
                # One long row: the library converts 16 rows at a time, here too few to be quick.
                values = dequantize(np.frombuffer(raw, np.uint8)[None], tensor.kind)
                yield slice(start, stop), values.reshape(stop - start, columns)


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, QuantError):
        return False
    return True


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = _number(file, "<u4")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_entries = _number(file, "<u8"), _number(file, "<u8")
    metadata = {}
    for _ in range(num_entries):
        key = _string(file)
        metadata[key] = _value(file, GGUFValueType(_number(file, "<u4")))
    found = []
    for _ in range(num_tensors):
        name = _string(file)
        shape = tuple(_number(file, "<u8") for _ in range(_number(file, "<u4")))
        kind = GGMLQuantizationType(_number(file, "<u4"))
        found.append((name, shape[::-1], kind, _number(file, "<u8")))
    alignment = int(metadata.get("general.alignment", _ALIGNMENT))
    data = -(-file.tell() // alignment) * alignment
    tensors = {
        name: GGUFTensor(name, shape, kind, data + offset) for name, shape, kind, offset in found
    }
    if len(tensors) != len(found):
        raise CheckpointError(f"{path}: two tensors have one name")
    return metadata, tensors


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError(f"it ends {size - len(data)} bytes early")
    return data


def _number(file: BinaryIO, kind: str) -> Any:
    dtype = np.dtype(kind)
    return np.frombuffer(_read(file, dtype.itemsize), dtype)[0].item()


def _string(file: BinaryIO) -> str:
    return _read(file, _number(file, "<u8")).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: GGUFValueType) -> Any:
    if kind is GGUFValueType.STRING:
        return _string(file)
    if kind is not GGUFValueType.ARRAY:
        return _number(file, _NUMBERS[kind])
    element, count = GGUFValueType(_number(file, "<u4")), _number(file, "<u8")
    if element is GGUFValueType.STRING:
        return [_read(file, size).decode("utf-8", "replace") for size in _sizes(file, count)]
    if element is GGUFValueType.ARRAY:
        return [_value(file, element) for _ in range(count)]
    dtype = np.dtype(_NUMBERS[element])
    return np.frombuffer(_read(file, count * dtype.itemsize), dtype)


def _sizes(file: BinaryIO, count: int) -> Iterator[int]:
    """The length before each string of an array (the caller reads the string in between)."""
    unpack = struct.Struct("<Q").unpack
    for _ in range(count):
        yield unpack(_read(file, 8))[0]
