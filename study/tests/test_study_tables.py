"""Every table in every language keeps its cells."""

import csv
import re

import pytest

from mcbn.errors import MCBNError
from mcbn_study.tables import _LATEX, MISSING, Table, escape_latex, markdown, to_csv, to_latex, to_markdown
from table_cells import cells_of, check_latex, unescape

AWKWARD = rf"a|b * _c_ {{d}} [e](f) <g> & `h` $i$ 5% #j ~k~ ^l \m ± {MISSING}"


def test_markdown_keeps_awkward_text():
    text = to_markdown(Table(AWKWARD, "table:x", ("a", AWKWARD), ((AWKWARD, "**** <b>"),), AWKWARD))
    heading, _, note, _, header, rule, row = text.rstrip("\n").split("\n")
    assert unescape(heading) == f"## {AWKWARD}"
    assert unescape(note) == AWKWARD
    assert cells_of(header) == ["a", AWKWARD]
    assert rule == "| --- | ---: |"
    assert cells_of(row) == [AWKWARD, "**** <b>"]
    assert "<" not in text
    assert not re.search(r"(?<!\\)[*_`]", text)


def test_latex_keeps_awkward_text():
    text = to_latex(Table(AWKWARD, "table:x", ("a", AWKWARD), ((AWKWARD, "b"), ("", "c")), AWKWARD))
    check_latex(text)
    plain = escape_latex(AWKWARD)
    for character, escaped in _LATEX.items():
        if len(escaped) > 2:
            plain = plain.replace(escaped, character)
    assert re.sub(r"\\([&%$#_{}])", r"\1", plain.replace("--", MISSING)) == AWKWARD


def test_rows_of_another_width_are_refused():
    with pytest.raises(MCBNError, match="table:x: 1 cells under 2 columns"):
        Table("t", "table:x", ("a", "b"), (("c",),))


def test_columns_are_padded_to_the_widest_cell_on_the_side_asked_for():
    rows = [("plain", "0.25", "x"), ("mcbn", "12", "yz")]
    assert markdown(("method", "s", ""), rows, "lr") == (
        "| method |    s |    |\n|--------|-----:|---:|\n| plain  | 0.25 |  x |\n| mcbn   |   12 | yz |\n"
    )
    assert markdown(("a",), [], "l", padded=False) == "| a |\n| --- |\n"


def test_comma_separated_values_come_back():
    rows = [("a,b", 1, None, 0.123456789), ('"c"', 2, "", 3.0)]
    text = to_csv(("name", "n", "none", "value"), rows)
    assert list(csv.reader(text.splitlines()))[1:] == [["a,b", "1", "", "0.123456789"], ['"c"', "2", "", "3.0"]]
    assert to_csv(("value",), [[0.123456789], [2]], digits=3) == "value\n0.123\n2\n"
