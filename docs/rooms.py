"""Shows `kernels/` and `models/` to the API pages as what they are imported as."""

from pathlib import Path
from typing import Any

import griffe


class Rooms(griffe.Extension):
    """Neither folder has an `__init__.py`, for which griffe leaves them out of a package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.name == "jaxattn":
            root = Path(__file__).resolve().parents[1]
            for room in ("kernels", "models"):
                pkg.set_member(room, griffe.GriffeLoader(search_paths=[root]).load(room))
