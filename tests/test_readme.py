"""The README's program for kernel users runs as it stands."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxattn import registry

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_kernel_program_runs_and_equals_the_reference(monkeypatch):
    (program,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "ragged_paged_attention" in block
    ]
    results = {}
    for backend in ("xla", "reference"):
        monkeypatch.setattr(registry, "AUTOMATIC", (backend,))
        exec(program, results.setdefault(backend, {}))
    out, exact = results["xla"]["out"], results["reference"]["out"]
    assert out.shape == (6, 4, 64) and out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact.astype(jnp.float32), atol=0.02)
    pages = results["xla"]["kv_pages"]
    written = {int(page) for page in np.flatnonzero(pages.any(axis=(1, 2, 3, 4)))}
    assert written == {5, 7}  # token 40 is in its sequence's third page


def test_it_is_one_screen_and_has_no_placeholders():
    assert len(README.splitlines()) < 120
    rows = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    assert all(row.count("|") in (5, 6) for row in rows), "a ragged table"
