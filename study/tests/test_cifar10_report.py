"""Tables and figure of CIFAR-10, from made-up records."""

import csv
import io
from pathlib import Path

import pytest

import mcbn
from mcbn_study import journal
from mcbn_study.cifar10 import report
from mcbn_study.cifar10.run import KIND, TRAINING
from mcbn_study.tables import MISSING

WHERE = {"hardware": "a GPU", "torch": "2", "commit": "0123456789abcdef", "config": {"batch_size": 32}}
CURVE = {1: -0.36, 2: -0.32, 4: -0.30, 128: -0.27}


def row(seed: int, method: str, part: str, T: int | None, M: int | None, **scores: float) -> dict:
    errors = {"pll_minus_shared": 0.002} if "pll_minus_shared" in scores else {"pll": 0.001} if T else {}
    about = {"kind": KIND, "network": "resnet32", "method": method, "seed": seed, "part": part, "n_images": 1000}
    return about | {"n_samples": T, "batch_size": M, "scores": scores, "errors": errors, **WHERE}


def study(shift: float = 0.0) -> list[dict]:
    rows = []
    for seed in (1, 2):
        more = 0.01 * seed + shift
        rows.append({"kind": TRAINING, "network": "resnet32", "seed": seed, "seconds": 240.0 + seed, **WHERE})
        rows[-1] |= {"milliseconds_per_step": 2.5, "loss": 0.1, "accuracy": 0.97}
        for part in ("validation", "test"):
            rows.append(row(seed, "plain", part, None, None, pll=-0.32 + more, accuracy=0.92, ece=0.05))
        rows += [row(seed, "mcbn", "test", T, 32, pll=v + more, accuracy=0.93, ece=0.02) for T, v in CURVE.items()]
        rows += [row(seed, "mcbn", "validation", 4, M, pll=-M / 100, accuracy=0.9, ece=0.01) for M in (16, 32)]
        rows.append(row(seed, "mcbn", "test", 4, 16, pll=-0.2, accuracy=0.9, ece=0.01))
        rows.append(row(seed, "mcbn_per_query", "query", 16, 32, pll=-0.26, pll_minus_shared=0.001))
        rows += [row(seed, "mcbn_shared", "query", 16, M, pll=-0.261) for M in (31, 32)]
    return rows


def cells(markdown: str, start: str) -> list[str]:
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_summary_has_the_columns_and_every_score() -> None:
    found = list(csv.DictReader(io.StringIO(report.summary(study()))))
    columns = ["network", "method", "seed", "n_samples", "batch_size", "metric", "value"]
    assert list(found[0]) == columns
    keys = [tuple(r[c] for c in columns[:-1]) for r in found]
    assert len(set(keys)) == len(keys)
    values = dict(zip(keys, (float(r["value"]) for r in found), strict=True))
    assert values["resnet32", "plain", "1", "", "", "pll"] == pytest.approx(-0.31)
    assert values["resnet32", "mcbn", "2", "128", "32", "pll"] == pytest.approx(-0.25)
    assert values["resnet32", "mcbn", "2", "128", "32", "pll_standard_error"] == pytest.approx(0.001)
    assert values["resnet32", "mcbn", "1", "4", "16", "validation_pll"] == pytest.approx(-0.16)
    assert values["resnet32", "training", "1", "", "", "seconds"] == pytest.approx(241)


def test_the_last_record_of_a_measurement_counts() -> None:
    (found,) = report.collect([*study(), *study(shift=-0.1)])
    assert found.values("pll", "plain") == pytest.approx({1: -0.41, 2: -0.40})


def test_tables_show_ours_beside_the_papers() -> None:
    (found,) = report.collect(study())
    text = report.page([found])
    assert cells(text, "paper") == ["paper", "-0.32", "-0.36", "-0.32", "-0.30", "-0.28"]
    assert cells(text, "ours")[1] == "-0.305 ± 0.005"  # plain: -0.31 and -0.30
    assert cells(text, "difference") == ["difference", "+0.015", "+0.015", "+0.015", "+0.015", "+0.025"]
    assert cells(text, "seed 2")[1:] == ["-0.3000", "-0.3400", "-0.3000", "-0.2800", "-0.2500"]
    assert cells(text, "PLL")[0] == "PLL"
    assert "| 16 (best on validation) | -0.1600 ± 0.0000 | -0.2000 ± 0.0000 | 90.00 ± 0.00 |" in text
    assert "+0.0010 ± 0.0020" in text
    assert "a GPU, torch 2, commit 0123456789ab" in text


def test_a_network_trained_otherwise_stands_beside_the_papers(tmp_path: Path) -> None:
    other = [r | {"network": "resnet32-all"} for r in study(0.01) if r.get("part") == "test"]
    journal.extend(tmp_path / "records.jsonl", [*study(), *other])
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "trained on all 50,000 images" in text
    assert text.count("## PLL over the number of passes") == 2
    assert text.count("## MCBN over the batch size M") == text.count("## Fresh batches") == 1
    line = next(line for line in text.splitlines() if " ours, 50,000 images " in line)
    gains = ["2", "-0.2950 ± 0.0050", "-0.2450 ± 0.0050", "0.0500 ± 0.0000", MISSING, MISSING, "5.00 ± 0.00"]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == gains


def test_files_are_written_from_records_alone(tmp_path: Path) -> None:
    journal.extend(tmp_path / "records.jsonl", study())
    written = report.write(tmp_path)
    assert [path.name for path in written] == ["summary.csv", "table.md", "resnet32-pll.png"]
    assert written[-1].read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "table.md").read_text().startswith("# CIFAR-10\n")


def test_no_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(mcbn.MCBNError, match="no CIFAR-10 records; make them with `mcbn reproduce cifar10`"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_gain_is_shown_for_networks_that_others_measured(tmp_path: Path) -> None:
    about = {"kind": "score", "data": "test", "tempered": False, "ece": 0.03}
    scored = {"plain": 0.3, "mcbn": 0.26, "thinned_plain": 0.25}
    rows = [about | {"method": method, "nll": nll + e} for method, nll in scored.items() for e in (-0.01, 0.01)]
    rows += [
        about | {"method": method, "tempered": tempered, "nll": nll}
        for method, tempered, nll in (("mcbn_joint", True, 0.24), ("mcbn_joint", False, 9), ("plain", True, 0.25))
    ]
    rows.append(about | {"method": "mcbn", "data": "validation", "nll": 5.0})
    about = {"network": "resnet32", "n": 10_000, "ece": 0.05}
    foreign = [about | {"method": m, "pll": pll} for m, pll in (("plain", -0.4), ("MCBN, M = 32", -0.3))]
    foreign.append(about | {"method": "plain", "pll": -7.0, "n": 500})
    journal.extend(tmp_path / "alternatives" / "records.jsonl", rows)
    journal.extend(tmp_path / "foreign" / "records.jsonl", foreign)
    ours = "-0.3000 ± 0.0100", "-0.2600 ± 0.0100", "0.0400 ± 0.0000", "-0.2500", "-0.2400", "3.00 ± 0.00"
    assert report.gains_by_network(tmp_path) == [
        ("ours, 48,000 images", "2", *ours),
        ("the paper's", MISSING, "-0.3200", "-0.2800", "0.0400", MISSING, MISSING, MISSING),
        ("trained by others at M = 128", "1", "-0.4000", "-0.3000", "0.1000", MISSING, MISSING, "5.00"),
    ]


def test_what_is_said_of_the_gain_is_what_the_records_hold() -> None:
    results = Path(__file__).parents[2] / "results"
    if not results.is_dir():
        pytest.skip("no results beside these tests")
    recorded = journal.read(results / "cifar10" / journal.RECORDS)
    studies = report.collect(recorded)
    rows = {row[0]: row[1:] for row in report.gains_by_network(results, studies)}
    plain, gain, ece = (
        {title: float(row[i].split()[0]) for title, row in rows.items() if row[i] != MISSING} for i in (1, 3, 6)
    )
    short = "ours, a quarter of the steps"
    assert 0.4 < gain["ours, 48,000 images"] / gain["the paper's"] < 0.6  # half
    assert plain[short] < plain["the paper's"] < plain["ours, 48,000 images"]
    assert min(gain, key=gain.__getitem__) == short
    rising = sorted(ece, key=ece.__getitem__)
    assert [*sorted(rising, key=gain.__getitem__)] == [*rising[:-2], rising[-1], rising[-2]]  # but for the last two
    for title, reached in (("trained with dropout 0.1", True), ("ours, 48,000 images", False)):
        alone, chosen = (tuple(map(float, cell.split(" ± "))) for cell in rows[title][4:6])
        assert (chosen[0] > -0.25) == reached
        assert abs(alone[0] - chosen[0]) < 0.001
        assert not reached or chosen[0] + 0.25 < chosen[1]  # by less than its error
    made = {
        kind: {r["seed"] for r in recorded if (r["kind"], r["network"]) == (kind, "resnet32-short")}
        for kind in (report.TRAINING, report.KIND)
    }
    assert [len(seeds) for seeds in made.values()] == [3, 2]
