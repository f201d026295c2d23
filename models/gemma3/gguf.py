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
from gguf.quants import dequantize

from jaxattn.models.gemma3.errors import CheckpointError

_ALIGNMENT = 32  # unless `general.alignment` says otherwise
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

    def rows(self, name: str, block_rows: int) -> Iterator[tuple[slice, np.ndarray]]:
        """A tensor's rows as float32, `block_rows` at a time: `(rows, values[rows, columns])`."""
        tensor = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, tensor.num_rows, block_rows):
                count = min(block_rows, tensor.num_rows - start)
                raw = file.read(count * tensor.row_bytes)
                stored = np.frombuffer(raw, np.uint8).reshape(count, tensor.row_bytes)
                yield slice(start, start + count), _to_float32(stored, tensor)


def _to_float32(stored: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    try:
        values = dequantize(stored, tensor.kind)
    except NotImplementedError:
        raise CheckpointError(
            f"tensor {tensor.name!r} is of type {tensor.kind.name}, which the gguf library cannot "
            "dequantise; use a file quantised as Q8_0, Q4_K_M, BF16, F16 or F32"
        ) from None
    return np.ascontiguousarray(values, np.float32)


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
