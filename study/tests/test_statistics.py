"""The appendix experiments, small: figures from draws, tables from records, records only ever appended."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from mcbn import MCBN
from mcbn_study import statistics
from mcbn_study.journal import read
from untouched import generators

SMALL: dict[str, Any] = {"dataset": "boston", "batch_sizes": (8, 16), "epochs": (1, 2), "n_samples": 40}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statistics")
    before = generators()
    statistics.run(folder, **SMALL)
    assert generators() == before
    return folder


def test_every_setting_has_a_record_with_where_it_was_made(out: Path) -> None:
    records = read(out / "records.jsonl")
    settings = {(r["layer"], r["statistic"], r["batch_size"], r["epoch"]) for r in records}
    assert len(records) == len(settings) == 2 * 2 * 2 * 2
    for record in records:
        assert {"seconds", "device", "hardware", "commit", "date", "config_hash"} <= set(record)
        assert record["n"] == 405
        assert record["units"] == 50


def test_tables_are_those_of_the_records(out: Path) -> None:
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    records = read(out / "records.jsonl")
    assert len(rows) == 16
    for row in rows:
        (record,) = [
            r
            for r in records
            if (statistics.LAYERS[r["layer"]], r["statistic"], str(r["batch_size"]), str(r["epoch"]))
            == (row["layer"], row["statistic"], row["M"], row["epoch"])
        ]
        assert float(row["Eq. (6)"]) == record["printed"]
        assert float(row["any Gaussian"]) == record["shape"]
        assert float(row["exact"]) == 0.95
    text = (out / "table.md").read_text()
    assert text.count("| layer 1 |") == 8
    assert "40 batches of M out of N = 405 rows (boston)" in text


def test_figures_are_images_and_nothing_is_left_over(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir())
    images = ["mean-layer1.png", "mean-layer2.png", "std-layer1.png", "std-layer2.png"]
    assert names == sorted([*images, "records.jsonl", "table.csv", "table.md"])
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in images)


def test_a_second_run_appends_and_the_table_shows_the_last(tmp_path: Path) -> None:
    options = SMALL | {"batch_sizes": (8,), "epochs": (1,)}
    statistics.run(tmp_path, **options)
    first = (tmp_path / "records.jsonl").read_text()
    statistics.run(tmp_path, **options | {"n_samples": 41})
    both = (tmp_path / "records.jsonl").read_text()
    assert both.startswith(first)
    assert len(both.splitlines()) == 8
    hashes = [json.loads(line)["config_hash"] for line in both.splitlines()]
    assert len(set(hashes)) == 2
    table = (tmp_path / "table.csv").read_text()
    assert len(table.splitlines()) == 5


def test_shares_are_those_of_scipy_unit_by_unit() -> None:
    (_, network, x), *_ = statistics._trained("boston", 16, (3,))
    found = list(statistics._test(network, x, 16, 200))
    posterior = MCBN(network, "regression").fit(x, n_samples=200, batch_size=16, seed=0).posterior
    h = (x - network.x_mean) / network.x_std @ network.network[0].weight.detach().T  # (N, 50): what layer 1 sees
    for row, curve in found[:2]:
        layer, statistic = row["layer"], row["statistic"]
        assert layer == "network.1"
        fourth = (h - h.mean(0)).pow(4).mean(0)
        variance = h.var(0, correction=0)
        if statistic == "mean":
            values, mean, std = posterior.mean[layer], h.mean(0), (variance / 16).sqrt()
        else:
            values, mean = posterior.var[layer].sqrt(), variance.sqrt()
            std = ((fourth - variance**2) / (4 * variance * 16)).sqrt()
        for name, factor in (("printed", 1.0), ("finite", ((405 - 16) / 404) ** 0.5)):
            p = [
                stats.kstest(values[:, u].double().numpy(), "norm", (float(mean[u]), factor * float(std[u]))).pvalue
                for u in range(50)
            ]
            assert abs(row[name] - sum(value > 0.05 for value in p) / 50) <= 0.02  # one unit may sit on the border
        assert row["spread"] == pytest.approx((values.std(0) / std).median().item(), rel=1e-3)
        torch.testing.assert_close(curve[0], values[:, 0])
        assert curve[1:] == pytest.approx((mean[0].item(), std[0].item()), rel=1e-4)


def test_a_constant_unit_fails_all_tests() -> None:
    values = torch.cat([torch.randn(100, 1, generator=torch.Generator().manual_seed(0)), torch.zeros(100, 1)], 1)
    found = statistics._shares(values, torch.zeros(2), torch.tensor([1.0, 0.0]), 1.0)
    assert found == {"printed": 0.5, "finite": 0.5, "shape": 0.5, "constant": 1, "spread": pytest.approx(1, abs=0.2)}
