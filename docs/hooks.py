"""What mkdocs cannot do by itself: pages made from the tree (results, errors, changelog), links that leave the site."""

import ast
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NUMERIC = re.compile(r"\s*[-+(\d\u2013](?!.*[a-z]{3} +[a-z])")  # not: 2 draws in one pass
PLACES = "results|benchmarks|examples|src|study|tests|README|CONTRIBUTING|CHANGELOG"
OUTSIDE = re.compile(rf"\[([^\]]+)\]\((?:\.\./)+(?!results/(?:\w+\.md|[^)]+\.png))((?:{PLACES})[^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tables of every study with their figures, the changelog, and the list of messages."""
    lines = tomllib.loads((ROOT / "docs" / "templates" / "results.toml").read_text())
    for study in re.findall(r"results/(\w+)\.md", str(config.nav)):
        source = ROOT / "results" / study / ("tables.md" if study == "regression" else "table.md")
        if not source.exists():
            raise PluginError(f"{source.relative_to(ROOT)} is missing; {lines[study].split('5. ')[1].strip()}")
        pictured = re.sub(r"(!\[[^\]]*\]\()(?!http)", rf"\1{study}/", source.read_text())  # in the page's own folder
        content = re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|#)([^)]+)\)", r"\1", pictured)  # without links that leave it
        whole = content.replace("\n", f"\n\n{lines[study]}", 1)
        files.append(File.generated(config, f"results/{study}.md", content=whole))
        for figure in source.parent.rglob("*.png"):
            files.append(File.generated(config, str(figure.relative_to(ROOT)), content=figure.read_bytes()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    files.append(File.generated(config, "guide/errors.md", content=errors_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead to a study on its own page and from a picture to itself; name files outside the site by their place."""
    home = "../" * page.file.src_uri.count("/")
    pictured = re.sub(r"(\]\()(?:\.\./)+results/(?=[^)]+\.png)", rf"\1{home}results/", markdown)
    linked = re.sub(r"(!\[[^\]]*\]\(([^)]+)\))", r"[\1](\2)", pictured)
    inside = re.sub(r"\]\((?:\.\./)+results/(\w+)/tables?\.md", rf"]({home}results/\1.md", linked)
    return re.sub(r"(?:^\|.*\n?)+", _legible, OUTSIDE.sub(r"\1 (`\2`)", inside), flags=re.MULTILINE)


def on_page_content(html: str, **_: object) -> str:
    """Keep a number with its per cent sign, error and exponent; long names in a table may go on below.

    Code and the headings of columns stay as they are, but an option of a command is not cut at its hyphens.
    """
    pieces = re.split(r"(<pre\b.*?</pre>|<code\b.*?</code>|<th\b.*?</th>)", html, flags=re.DOTALL)
    for i, piece in enumerate(pieces[::2]):
        joined = re.sub(r"(?<=\d) (?=%)|(?<=±) (?=\d)", "\u00a0", piece)
        whole = re.sub(r"(?<=\dE)-(?=\d)", "\u2011", joined)
        pieces[2 * i] = re.sub(r"(?<=<td>)\w+(?=</td>)", lambda name: name[0].replace("_", "_<wbr>"), whole)
    pieces[1::2] = (re.sub(r"(?<![\w-])--\w[\w-]*", r'<span class="whole">\g<0></span>', code) for code in pieces[1::2])
    return "".join(pieces)


def _legible(table: re.Match[str]) -> str:
    """Columns of words stand to the left, and a number stays with its error."""
    head, rule, *rows = table[0].replace("± ", "±\u00a0").splitlines()
    columns = zip(*(re.split(r"(?<!\\)\|", row.strip()[1:-1]) for row in rows), strict=True)
    sides = ["---:" if any(map(NUMERIC.match, column)) else "---" for column in columns]
    return "\n".join([head, f"|{'|'.join(sides) or rule.strip('|')}|", *rows, ""])


def errors_page() -> str:
    """List every message that mcbn raises or warns, by module, as written in the source."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src" / "mcbn").rglob("*.py"))}
    assigned = (node for tree in trees.values() for node in tree.body if isinstance(node, ast.Assign))
    named = {ast.unparse(n.targets[0]): n.value for n in assigned if isinstance(getattr(n.value, "value", 0), str)}
    lines = [(ROOT / "docs" / "templates" / "errors.md").read_text()]
    for path, tree in trees.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        raised = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("MCBNError", "warn")]
        texts = {_text(call.args[0], named | _given(tree, call)) for call in raised}
        messages = sorted(text for text in texts if re.search(r"\w+ \w+", text))
        if messages:
            lines += [f"## {path.relative_to(ROOT / 'src' / 'mcbn').with_suffix('')}".removesuffix("/__init__"), ""]
            lines += ["- " + re.sub(r"([<*_])", r"\\\1", message) for message in messages] + [""]
    return "\n".join(lines)


def _given(tree: ast.Module, call: ast.Call) -> dict[str, ast.expr]:
    """Find the texts that have a name where this is called: the last above it in the same function."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    around = [node for node in around if node.lineno <= call.lineno <= (node.end_lineno or 0)]
    inner = max(around, key=lambda node: node.lineno, default=ast.Module([]))
    above = [node for node in ast.walk(inner) if isinstance(node, ast.Assign) and node.lineno < call.lineno]
    above.sort(key=lambda node: node.lineno)
    return {ast.unparse(node.targets[0]): node.value for node in above if _is_text(node.value)}


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp | ast.BinOp):
        return any(map(_is_text, (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node.left, node.right)))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.expr, named: dict[str, ast.expr]) -> str:
    """Put a text together from its pieces; what is filled in later stands in braces, by its name if it has one."""
    if isinstance(node, ast.JoinedStr | ast.BinOp):
        pieces = node.values if isinstance(node, ast.JoinedStr) else (node.left, node.right)
        return "".join(_text(piece, named) for piece in pieces)
    if isinstance(node, ast.Constant):
        return str(node.value)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(inner, ast.IfExp) and _is_text(inner):
        return " / ".join(filter(None, (_text(choice, named) for choice in (inner.body, inner.orelse))))
    if isinstance(inner, ast.Name) and inner.id in named:
        return _text(named[inner.id], {name: text for name, text in named.items() if name != inner.id})
    return f"{{{inner.id}}}" if isinstance(inner, ast.Name) else "…"
