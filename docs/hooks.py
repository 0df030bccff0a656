"""What mkdocs cannot do by itself: pages made from the tree (results, errors, changelog), links that leave the site."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(
    r"\]\((?:\.\./)+((?:results|benchmarks|examples|src|study|tests|README|CONTRIBUTING|CHANGELOG)[^)]*)\)"
)
RESULTS = (
    *("regression", "cifar10", "alternatives", "segmentation", "posteriors", "foreign", "estimators", "zoo"),
    *("shift", "coverage", "comparison", "labels", "statistics", "correlations", "regularizer", "objective"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tables of every study with their figures, the changelog, and the list of messages."""
    for study in RESULTS:
        source = ROOT / "results" / study / ("tables.md" if study == "regression" else "table.md")
        if not source.exists():
            raise PluginError(f"{source.relative_to(ROOT)} is missing; make it with `mcbn reproduce tables`")
        pictured = re.sub(
            r"(!\[[^\]]*\]\()(?!http)", rf"\1{study}/", source.read_text()
        )  # beneath the page's own folder
        content = re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|#)([^)]+)\)", r"\1", pictured)  # without links that leave it
        files.append(File.generated(config, f"results/{study}.md", content=content))
        for figure in source.parent.rglob("*.png"):
            place = f"results/{study}/{figure.relative_to(source.parent)}"
            files.append(File.generated(config, place, content=figure.read_bytes()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    files.append(File.generated(config, "guide/errors.md", content=errors_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Lead to tables and figures of a study on its own page, and to other files outside the site in the repository."""
    home = "../" * page.file.src_uri.count("/")
    pictured = re.sub(r"(!\[[^\]]*\]\()(?:\.\./)+results/", rf"\1{home}results/", markdown)
    inside = re.sub(r"\]\((?:\.\./)+results/(\w+)/tables?\.md", rf"]({home}results/\1.md", pictured)
    return OUTSIDE.sub(rf"]({config.extra['repository']}/blob/main/\1)", inside)


def errors_page() -> str:
    """List every message that mcbn raises or warns, by module, as written in the source."""
    lines = ["# Every warning and error", "", "Each says what is wrong, what was received and what to do.", ""]
    for path in sorted((ROOT / "src" / "mcbn").rglob("*.py")):
        messages = sorted(set(_messages(ast.parse(path.read_text()))))
        if messages:
            lines += [f"## {path.relative_to(ROOT / 'src' / 'mcbn').with_suffix('')}", ""]
            lines += [f"- {message}" for message in messages] + [""]
    return "\n".join(lines)


def _messages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if name in ("MCBNError", "warn") and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            pieces = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args[:1]
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in pieces)
            yield text.replace("<", "&lt;").replace("*", r"\*")
