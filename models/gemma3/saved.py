"""Our own checkpoints: a folder with an Orbax checkpoint, the config and the tokenizer.

    jaxattn.json      version, config, how weights are quantised, and the size of every other file
    weights/          an Orbax checkpoint: one array for each name of `weight_table`
    tokenizer.json    or tokenizer.model

Written beside its place and renamed last, so that a folder of that name is whole. `weights` is
plain Orbax: its checkpointers restore it to any shardings. Here rows are read through TensorStore,
which is what Orbax stores arrays with, as from the other formats: quantised or cut for a device on
the way, and never whole in memory.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.errors import CheckpointError, UnsupportedModelError
from jaxattn.models.gemma3.finite import all_finite
from jaxattn.models.gemma3.weights import VISION, Quantization, quantization_of

_ABOUT, _WEIGHTS, _VERSION = "jaxattn.json", "weights", 1
_CHUNK_BYTES = 4 * 2**20  # of a stored array, what is read at a time at least
_DTYPES = ("float32", "bfloat16", "int8")


class SavedFolder:
    """A folder that `save_checkpoint` wrote. Checks it; rows are read when asked for.

    `images=False`: without the vision tower, if there is one.

    Raises CheckpointError for files that are missing, of another size, or not what they should be.
    """

    heads: tuple[str, ...] = ()  # the embedding is the only one that is saved

    def __init__(self, path: Path, *, images: bool = True):
        import tensorstore  # this and the next two take a second: not for other formats

        self.path = path
        about = _read_about(path / _ABOUT)
        self.config: Gemma3Config = _config(path / _ABOUT, about["config"])
        self.quantize: Quantization | None = about["quantize"]
        _check_sizes(path, about["files"])
        store = {"driver": "ocdbt", "base": (path / _WEIGHTS).absolute().as_uri()}
        self._arrays: dict[str, Any] = {}
        try:
            listed = tensorstore.KvStore.open(store).result().list().result()
            for name in sorted(
                key.decode().removesuffix("/zarr.json")
                for key in listed
                if key.endswith(b"/zarr.json")
            ):
                spec = {"driver": "zarr3", "kvstore": {**store, "path": f"{name}/"}}
                self._arrays[name] = tensorstore.open(spec, open=True, read=True).result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path / _WEIGHTS} is damaged: {error}") from error
        other = [
            f"{n} ({a.dtype.name})" for n, a in self._arrays.items() if a.dtype.name not in _DTYPES
        ]
        if other:
            raise CheckpointError(
                f"{path}: {', '.join(other)}: weights are read from {', '.join(_DTYPES)}"
            )

        if not images:
            self.config = replace(self.config, vision=None)
            self._arrays = {n: a for n, a in self._arrays.items() if not n.startswith(VISION)}

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether this is a folder of ours, and not another format's."""
        return (path / _ABOUT).is_file()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array."""
        return {name: array.shape for name, array in self._arrays.items()}

    def is_finite(self, name: str, rows: slice) -> bool:
        """Whether rows of an array hold neither NaN nor infinity."""
        return all_finite(self._read(name, rows))

    def rows(self, name: str, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of an array as float32, or int8 if stored so, in one piece (a vector is one row)."""
        values = self._read(name, rows)
        yield rows, values if values.dtype == np.int8 else values.astype(np.float32)

    def _read(self, name: str, rows: slice) -> np.ndarray:
        array = self._arrays[name]
        try:
            return (array[None] if array.rank == 1 else array[rows]).read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.path}: {name} is damaged: {error}") from error


def save_checkpoint(
    folder: Path,
    config: Gemma3Config,
    weights: Mapping[str, np.ndarray],
    tokenizer: tuple[str, bytes],
    *,
    force: bool = False,
) -> None:
    """Write a folder, whole or not at all.

    `tokenizer`: name and content of its file, from `tokenizer_file`. `force` replaces a checkpoint
    of ours; FileExistsError for anything else that is there.
    """
    check_target(folder, force=force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        new = scratch / "new"
        _write(new, config, weights, tokenizer)
        old = scratch / "old"
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(folder: Path, *, force: bool) -> None:
    """Raise FileExistsError if a checkpoint cannot be written here."""
    if not folder.exists():
        return
    if not force:
        raise FileExistsError(f"{folder} exists: give another name, or --force to replace it")
    if not SavedFolder.is_at(folder):
        raise FileExistsError(
            f"{folder} is no checkpoint that `jaxattn convert` wrote, and is not replaced: remove "
            "it yourself or give another name"
        )


def _write(
    folder: Path,
    config: Gemma3Config,
    weights: Mapping[str, np.ndarray],
    tokenizer: tuple[str, bytes],
) -> None:
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in weights}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            (folder / _WEIGHTS).absolute(),
            args=ocp.args.PyTreeSave(dict(weights), save_args=chunks),
        )
    (folder / tokenizer[0]).write_bytes(tokenizer[1])
    about = {
        "version": _VERSION,
        "config": asdict(config),
        "quantize": quantization_of(weights),
        "files": _sizes(folder),
    }
    (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, but for the one that lists them."""
    found = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(found)
        if path != folder / _ABOUT
    }


def _check_sizes(folder: Path, listed: dict[str, int]) -> None:
    found = _sizes(folder)
    wrong = [
        f"{name} is missing" if name not in found else f"{name} has {found[name]} bytes, not {size}"
        for name, size in listed.items()
        if found.get(name) != size
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged or incomplete, copy or convert it again: {'; '.join(wrong)}"
        )


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        found = about.get("version") if isinstance(about, dict) else None
        raise UnsupportedModelError(f"{path} has version {found!r}; only {_VERSION} can be read")
    valid = (
        about.keys() == {"version", "config", "quantize", "files"}
        and about["quantize"] in (None, "int8")
        and isinstance(about["files"], dict)
    )
    if not valid:
        raise CheckpointError(f"{path} is damaged: it lacks, or has more than, what is expected")
    return about


def _config(path: Path, stored: Any) -> Gemma3Config:
    """The config, if each of its values is there, and nothing else."""
    from pydantic import TypeAdapter, ValidationError

    try:
        config = TypeAdapter(Gemma3Config).validate_json(json.dumps(stored), strict=True)
    except (ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} describes no possible model: {error}") from error
    if json.loads(json.dumps(asdict(config))) != stored:
        raise CheckpointError(f"{path}: the config has missing or unknown entries")
    return config
