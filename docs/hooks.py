"""What the site takes from elsewhere in the repository while it is built. Nothing is a copy.

The README, CONTRIBUTING, CHANGELOG, the benchmarks' pages and the notebooks are pages under their
own paths. Links go from file to file, as on GitHub: those to files that are no pages lead there.
"""

import re
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

import jaxattn

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
BENCHMARKS = sorted(ROOT.glob("benchmarks/*.md"))
SINGLE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
TABLE = re.compile(
    r"(?<=<!-- support table: begin -->\n).*?(?=<!-- support table: end -->)", re.DOTALL
)


def uri(source: Path) -> str:
    """The path of a file's page in the site."""
    folder = ROOT / "docs" if source.is_relative_to(ROOT / "docs") else ROOT
    return source.relative_to(folder).as_posix().replace(".ipynb", ".md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    position = next(i for i, entry in enumerate(config.nav) if "API" in entry)
    config.nav.insert(position, {"Notebooks": [uri(source) for source in NOTEBOOKS]})
    config.nav.insert(-1, {"Benchmarks": [uri(source) for source in BENCHMARKS]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source in (*SINGLE, *BENCHMARKS):
        files.append(File.generated(config, uri(source), content=source.read_text()))
    for source in NOTEBOOKS:
        text, _ = MarkdownExporter().from_filename(str(source))
        files.append(File.generated(config, uri(source), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = ROOT / "docs" / here
    folder = source.parent if source.exists() else (ROOT / here).parent

    def relink(match: re.Match[str]) -> str:
        target = (folder / match[0]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # a broken link, which `--strict` refuses, or no link
        if uri(target) in files.src_uris:
            return relpath(uri(target), Path(here).parent)
        return f"{config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}"

    # On GitHub itself, for notebooks, which are also read elsewhere.
    markdown = markdown.replace(f"]({config.repo_url}/blob/main/", f"]({relpath(ROOT, folder)}/")
    return TABLE.sub(lambda match: jaxattn.support_table(), LINK.sub(relink, markdown))
