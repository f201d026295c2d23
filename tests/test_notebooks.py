"""The notebooks are documents: short cells, no outputs committed, and they run to the end."""

import ast
import os
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
COLAB = "https://colab.research.google.com/github/jaxattn/jaxattn/blob/main/notebooks"
MAX_LINES = 15  # of a cell
TIMEOUT = 600  # seconds for a cell; a whole notebook takes about one minute on two cores

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def sections(notebook: nbformat.NotebookNode) -> dict[str, list[str]]:
    """The code cells under each `## heading`; cells before the first heading are left out."""
    found: dict[str, list[str]] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found[cell.source.splitlines()[0]] = []
        elif cell.cell_type == "code" and found:
            found[next(reversed(found))].append(cell.source)
    return found


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS, f"no notebook in {FOLDER}"


@each_notebook
def test_is_committed_without_outputs(path: Path) -> None:
    for cell in read(path).cells:
        assert not cell.metadata, cell.id  # tags such as raises-exception would hide errors
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


@each_notebook
def test_cells_are_short(path: Path) -> None:
    for cell in read(path).cells:
        lines = cell.source.splitlines()
        assert 0 < len(lines) <= MAX_LINES, f"{cell.id} has {len(lines)} lines"


@each_notebook
def test_opens_in_colab(path: Path) -> None:
    notebook = read(path)
    title = notebook.cells[0]
    assert title.cell_type == "markdown" and title.source.startswith("# ")
    assert f"({BADGE})]({COLAB}/{path.name})" in title.source
    installing = [cell.source for cell in code_cells(notebook) if "pip install" in cell.source]
    assert len(installing) == 1 and installing[0].count("pip install") == 1
    assert 'if find_spec("jaxattn") is None:\n    %pip install' in installing[0]


@each_notebook
def test_sections_end_with_a_check(path: Path) -> None:
    notebook = read(path)
    with_code = {heading: cells for heading, cells in sections(notebook).items() if cells}
    assert with_code
    for heading, cells in with_code.items():
        last = ast.walk(ast.parse(cells[-1]))
        assert any(isinstance(node, ast.Assert) for node in last), heading


@each_notebook
def test_runs(path: Path, tmp_path: Path) -> None:
    # Without folders to look in, the kernel is this interpreter, whatever else is installed.
    specs = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    client = NotebookClient(
        read(path), km=manager, timeout=TIMEOUT, resources={"metadata": {"path": str(FOLDER)}}
    )
    # A person's notebook has one CPU device, not the two of conftest.py, and no profile of ours.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "IPYTHONDIR": str(tmp_path)}
    environment.pop("XLA_FLAGS", None)
    client.execute(env=environment, cleanup_kc=True)  # it leaves a given manager's kernel alive
    assert all(cell.execution_count for cell in code_cells(client.nb))
