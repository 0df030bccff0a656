"""Helpers of tests of tables: read Markdown cells back, and check LaTeX without LaTeX."""

import html
import re


def unescape(markdown):
    return html.unescape(re.sub(r"\\(.)", r"\1", markdown))


def cells_of(line):
    return [unescape(part).strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def check_latex(text):
    """Balanced braces and environments, and as many cells in every row as columns; no LaTeX is at hand."""
    plain = re.sub(r"(?m)(?<!\\)%.*$", "", text)
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", plain.replace(r"\\", "")):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    assert len(re.findall(r"(?<!\\)\$", plain.replace(r"\\", ""))) % 2 == 0
    assert re.findall(r"\\begin{(\w+)}", plain) == ["table", "tabular"] * plain.count(r"\end{table}")
    for columns, body in re.findall(r"\\begin{tabular}{(l\w*)}\n(.*?)\\end{tabular}", plain, re.DOTALL):
        for row in body.splitlines():
            if row.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
            else:
                assert row in (r"\toprule", r"\midrule", r"\bottomrule", r"\addlinespace[2pt]")
