"""The documentation: snippets print what the pages show, the site builds strictly, messages are listed."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = sorted(path for path in (ROOT / "docs" / "snippets").glob("*.py") if path.stem != "trained")
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.mark.slow
@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
def test_a_snippet_prints_what_its_page_shows(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    printed, shown = capsys.readouterr().out, path.with_suffix(".txt").read_text()
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    numbers = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
    for got, expected in zip(*numbers, strict=True):  # last digits differ from machine to machine
        assert got == pytest.approx(expected, rel=0.1, abs=0.06), f"{path.name} prints {got}, its page shows {expected}"


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.sub("<[^>]+>", "", (tmp_path / "site" / "quickstart" / "regression" / "index.html").read_text())
    assert "pred = bayes.predict(x)" in shown
    assert "--8" not in shown
    page = (tmp_path / "site" / "guide" / "errors" / "index.html").read_text()
    assert "variance must not be negative" in page
    assert not re.findall(r'(?:src|href)="https?://(?:fonts|cdn|unpkg)', page)
