"""What a release needs: one version, links that work on a package index, files that keep to their schemas."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mcbn

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = {
    "vendor.citation-file-format": ["CITATION.cff"],
    "vendor.github-workflows": sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    "vendor.github-issue-forms": sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
}


def test_the_study_has_the_version_of_the_library() -> None:
    study = tomllib.loads((ROOT / "study" / "pyproject.toml").read_text())["project"]
    assert study["version"] == mcbn.__version__
    assert f"mcbn[cli]=={mcbn.__version__}" in study["dependencies"]
    assert SETTINGS["tool"]["hatch"]["version"]["path"] == "src/mcbn/__init__.py"


def test_no_link_of_the_readme_leads_nowhere_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text() + "[page](docs/page.md) ![picture](docs/a.png) [x](#y) [z](https://z)"
    for rule in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], re.sub(r"\\(\d)", r"\\g<\1>", rule["replacement"]), text)
    assert text.endswith("page (`docs/page.md`) *picture (`docs/a.png`)* [x](#y) [z](https://z)")
    assert all(link.startswith(("https://", "http://", "#")) for link in re.findall(r"\]\(([^)]+)\)", text))


def test_no_address_is_claimed_for_the_project() -> None:
    pages = [*ROOT.glob("[!.]*.*"), *(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.md")]
    texts = {page.name: page.read_text("utf-8") for page in pages if page.is_file()}
    assert [name for name, text in texts.items() if re.search(r"https?://[^\s)\"']*mcbn", text)] == []


@pytest.mark.parametrize("schema", FORMS)
def test_files_for_the_forge_keep_to_their_schemas(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, FORMS[schema])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_programs_that_make_runs_are_installed() -> None:
    pytest.importorskip("griffecli")
    named = re.findall(r"\$\(BIN\)/([\w-]+)", (ROOT / "Makefile").read_text())
    assert {name for name in named if not (Path(sys.executable).parent / name).exists()} == set()


@pytest.mark.slow
def test_the_source_distribution_is_small_and_whole(tmp_path: Path) -> None:
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    archive = next(tmp_path.glob("mcbn-*.tar.gz"))
    assert archive.stat().st_size < 2_000_000
