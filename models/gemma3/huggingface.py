"""Reading a Hugging Face folder: `config.json` and one or several safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.finite import all_finite

# Where the text model is: text-only, multimodal (transformers v4), multimodal (v5), and either
# saved without a head.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
# Where the vision tower and its projector are: transformers v5 (older and newer), v4.
_TOWERS = (
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.vision_model.",
    "vision_tower.",
)
_PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.")
_DTYPES = ("F32", "F16", "BF16")


class HuggingFaceFolder:
    """A folder's config and tensors. Reads headers; tensors are read when asked for.

    `images=False` passes over the vision tower and its projector.

    Raises CheckpointError for files that are missing, damaged or do not fit the index.
    """

    # Physically there in some checkpoints, though Gemma 3's head is the embedding.
    heads: tuple[str, ...] = ("lm_head.weight", "language_model.lm_head.weight")

    def __init__(self, path: Path, *, images: bool):
        self.path = path
        self._skipped = () if images else _TOWERS + _PROJECTORS
        self.config: dict[str, Any] = _read_json(path / "config.json")
        self._file_of, self._shapes = self._index()
        fitting = [
            prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in self._file_of
        ]
        if not fitting:
            raise CheckpointError(
                f"{path}: no tensor is called embed_tokens.weight under any of {_PREFIXES}"
            )
        self.prefix = fitting[0]
        self.tower_prefix = self._first_in_use(_TOWERS)
        self.projector_prefix = self._first_in_use(_PROJECTORS)

    def _first_in_use(self, prefixes: tuple[str, ...]) -> str:
        """The first prefix that any tensor has; without one the first of all."""
        used = [each for each in prefixes if any(name.startswith(each) for name in self._shapes)]
        return (used or list(prefixes))[0]

    def _index(self) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
        """File of every tensor, and shape of those that are not passed over."""
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        listed: dict[str, str] | None = None
        if index.is_file():
            listed = _weight_map(index)
            files = sorted(set(listed.values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise CheckpointError(
                f"{self.path} holds neither model.safetensors nor model.safetensors.index.json"
            )
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            raise CheckpointError(f"{self.path}: the index names missing files: {missing}")
        file_of: dict[str, Path] = {}
        shapes, dtypes = {}, {}
        for name in files:
            for tensor, (shape, dtype) in _read_header(self.path / name).items():
                if tensor in file_of:
                    raise CheckpointError(
                        f"{self.path}: {tensor} is in {file_of[tensor].name} and in {name}"
                    )
                file_of[tensor], shapes[tensor] = self.path / name, shape
                if not tensor.startswith(self._skipped):
                    dtypes[tensor] = dtype
        if listed is not None:
            _check_total(index, [self.path / name for name in files])
            wrong = sorted(
                tensor
                for tensor in listed.keys() | file_of.keys()
                if tensor not in file_of or file_of[tensor] != self.path / listed.get(tensor, "")
            )
            if wrong:
                raise CheckpointError(
                    f"{self.path}: tensors are not where the index says: {', '.join(wrong)}"
                )
        unreadable = [
            f"{tensor} ({dtype})" for tensor, dtype in dtypes.items() if dtype not in _DTYPES
        ]
        if unreadable:
            raise CheckpointError(
                f"{self.path}: {', '.join(unreadable)}: weights are read from {', '.join(_DTYPES)}"
            )
        return file_of, {tensor: shapes[tensor] for tensor in dtypes}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that is not passed over."""
        return self._shapes

    def is_finite(self, name: str, rows: slice) -> bool:
        """Whether rows of a tensor hold neither NaN nor infinity."""
        return all_finite(self._read(name, rows))

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a tensor as float32, in one piece (a vector is one row)."""
        yield rows, self._read(name, rows).astype(np.float32)

    def _read(self, name: str, rows: slice) -> np.ndarray:
        # Opened for each piece, so that no more of the mapped file stays in memory.
        try:
            with safe_open(self._file_of[name], framework="numpy") as file:
                stored = file.get_slice(name)
                return stored[:][None] if len(stored.get_shape()) == 1 else stored[rows]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._file_of[name]} changed while it was read ({error})"
            ) from error


def _check_total(index: Path, files: list[Path]) -> None:
    """Raise CheckpointError if the files hold other bytes of tensors than the index says."""
    metadata = _read_json(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return
    found = 0
    for path in files:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        found += path.stat().st_size - 8 - header
    if total != found:
        raise CheckpointError(
            f"{index} says that the tensors take {total} bytes, and the files hold {found}: some "
            "are truncated or from another checkpoint; fetch or copy them again"
        )


def _weight_map(index: Path) -> dict[str, str]:
    """File name of each tensor."""
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    return listed


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: expected a Hugging Face folder with config.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor in a file."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged or truncated ({error}); fetch or copy it again"
        ) from error
