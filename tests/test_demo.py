"""The demonstration end to end, small."""

from pathlib import Path

import pytest
import torch

from command_line import invoke
from mcbn import data, demo, metrics
from mcbn.noise import constant_tau


@pytest.mark.slow
def test_demo_writes_figures_and_report_and_prints_the_table(tmp_path: Path) -> None:
    printed = invoke("demo", "--out", str(tmp_path / "new"), "--splits", "2", "--epochs", "20").stdout
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["report.html", "toy.png", "uncertainty_error.png"]
    for row in ("boston", "concrete"):
        line = next(text for text in printed.splitlines() if text.startswith(row))
        assert line.count("+-") == 8
    assert "seconds; figures:" in printed
    assert str(tmp_path / "new" / "report.html") in printed.splitlines()[-1]


def test_scores_compare_variances_at_the_same_mean() -> None:
    x, y = (values.float() for values in data.load("boston"))
    bayes = demo.train_and_fit(x, y, demo.Setting(32, 1e-3, 5), 0, lambda n: None)
    bayes.tune((x, y))
    constant = float(constant_tau(bayes.predict(x).mean, y))
    scores = demo.score(bayes, x, y, constant).columns
    pred = bayes.predict(x)
    assert scores["RMSE"] == pytest.approx((pred.mean - y).square().mean().sqrt().item())
    assert scores["CRPS"] == pytest.approx(metrics.crps_gaussian(pred.mean, pred.variance, y).mean().item())
    normal = torch.distributions.Normal(pred.mean, constant**-0.5)
    assert scores["PLL constant"] == pytest.approx(normal.log_prob(y).mean().item(), rel=1e-5)
    best = metrics.crps_optimum(pred.mean, y).mean().item()
    share = (scores["CRPS"] - scores["CRPS constant"]) / (best - scores["CRPS constant"]) * 100
    assert scores["CRPS normalised %"] == pytest.approx(share, rel=1e-3)
