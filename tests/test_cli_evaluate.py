"""`mcbn evaluate`: scores by their definitions, beside the constant twin or the plain network."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mcbn
from command_line import (
    CLASSES,
    COLUMNS,
    FIT,
    MODEL,
    MODULE,
    arrays,
    assert_refused,
    by_hand,
    evaluate,
    invoke,
    network,
    predict,
)
from mcbn import metrics
from workplace import read_csv, write_csv

pytestmark = pytest.mark.usefixtures("at_work")


def test_evaluate_equals_the_definitions() -> None:
    report = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--coverage", "0.8")
    x, y = arrays("test.npz")
    bayes = by_hand()
    pred = bayes.predict(x)
    mean, std, target = (part.double().numpy() for part in (pred.mean, pred.std, y))
    assert report["tau"] == pytest.approx(bayes.tau, rel=1e-4)
    assert report["mcbn"]["rmse"] == pytest.approx(np.sqrt(((mean - target) ** 2).mean()), rel=1e-5)
    density = torch.distributions.Normal(bayes.sample(x).double(), float(bayes.tau) ** -0.5).log_prob(y.double())
    assert report["mcbn"]["pll"] == pytest.approx((density.logsumexp(0) - math.log(30)).mean().item(), rel=1e-4)
    grid = np.linspace(-12, 12, 40001)  # CRPS as the integral it is
    cdf = torch.special.ndtr(torch.from_numpy((grid[:, None] - mean) / std)).numpy()
    crps = (((cdf - (grid[:, None] >= target)) ** 2).sum(0) * (grid[1] - grid[0])).mean()
    assert report["mcbn"]["crps"] == pytest.approx(crps, rel=1e-3)
    for level, width in (("0.5", 0.67449), ("0.8", 1.28155), ("0.95", 1.95996)):
        assert report["coverage"][level] == pytest.approx((abs(target - mean) <= width * std).mean())
    assert (report["n_points"], report["n_samples"], report["batch_size"]) == (50, 30, 16)


def test_the_constant_twin_is_the_best_constant_of_the_validation_data() -> None:
    x, y = arrays("val.npz")
    mean = by_hand().predict(x).mean
    taus = torch.logspace(-2, 3, 4001, dtype=torch.float64)
    scores = [metrics.crps_gaussian(mean, torch.full_like(mean, 1 / tau), y).mean().item() for tau in taus.tolist()]
    best = taus[int(np.argmin(scores))].item()
    of_fit = evaluate("--posterior", "net.mcbn", "--data", "test.npz")
    of_tune = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--tune", "val.npz")
    assert of_fit["constant_tau"] == pytest.approx(best, rel=5e-3)
    assert of_tune["constant_tau"] == pytest.approx(of_fit["constant_tau"], rel=1e-6)
    assert (of_fit["constant_tau_tuned_on"], of_tune["constant_tau_tuned_on"]) == (
        "the validation data of the fit",
        "val.npz",
    )
    test_x, test_y = arrays("test.npz")
    test_mean = by_hand().predict(test_x).mean
    constant = metrics.crps_gaussian(test_mean, torch.full_like(test_mean, 1 / of_fit["constant_tau"]), test_y)
    assert of_fit["constant"]["crps"] == pytest.approx(constant.mean().item(), rel=1e-5)
    optimum = metrics.crps_optimum(test_mean, test_y).mean().item()
    share = (of_fit["mcbn"]["crps"] - of_fit["constant"]["crps"]) / (optimum - of_fit["constant"]["crps"])
    assert of_fit["normalized_percent"]["crps"] == pytest.approx(100 * share, rel=1e-3)


def test_a_twin_without_validation_data_is_tuned_on_the_scored_data_and_says_so() -> None:
    bayes = by_hand()
    bayes.save("plain.mcbn")
    report = evaluate("--posterior", "plain.mcbn", "--data", "test.npz")
    assert "scored data itself" in report["constant_tau_tuned_on"]
    assert report["constant"]["crps"] <= evaluate("--posterior", "net.mcbn", "--data", "test.npz")["constant"]["crps"]
    text = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "test.npz").stdout
    assert "tuned on the scored data itself" in text
    assert "inside the 95 % Gaussian interval" in text
    assert f"noise std {float(bayes.noise_std):.4g}" in text.splitlines()[0]
    assert " tau" not in text


@pytest.mark.parametrize("factory", ["test_loader", "dataset", "streamed", "tensors", "dicts", "generated"])
def test_whatever_a_factory_returns_is_scored_alike(factory: str) -> None:
    data = f"{MODULE}:{factory}"
    expected = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--tune", "test.npz")
    found = evaluate("--posterior", "net.mcbn", "--data", data, "--tune", data)
    for part in ("mcbn", "constant"):
        assert found[part] == pytest.approx(expected[part], rel=1e-4)
    assert predict("--data", data, "--out", "pred.csv").exit_code == 0
    assert len(read_csv(Path("pred.csv"))["mean"]) == 50


def test_several_outputs_are_numbered_and_scored() -> None:
    model = ("--model", f"{MODULE}:pair", "--weights", "pair.pt")
    for part in ("train", "val", "test"):
        x, y = arrays(f"{part}.npz")
        rows = torch.cat([x, torch.stack([y, -y], 1)], 1).tolist()
        write_csv(Path(f"pair_{part}.csv"), ["a", "b", "c", "up", "down"], rows)
    tables = ("--data", "pair_train.csv", "--tune", "pair_val.csv", "--target", "up,down", "--out", "pair.mcbn")
    assert invoke("fit", *model, *tables, "--task", "regression", "--batch-size", "16").exit_code == 0
    common = ("--posterior", "pair.mcbn", *model, "--data", "pair_test.csv")
    assert invoke("predict", *common, "--out", "pair.csv").exit_code == 0
    assert list(read_csv(Path("pair.csv"))) == [f"{name}_{d}" for name in COLUMNS for d in (0, 1)]
    result = invoke("evaluate", *common, "--json")
    report = json.loads(result.stdout)
    assert len(report["constant_tau"]) == len(report["tau"]) == 2
    assert 0.8 < report["coverage"]["0.95"] <= 1


def test_classification_writes_probabilities_and_scores_them() -> None:
    assert invoke("predict", *CLASSES, "--data", "test_x.npy", "--out", "pred.csv").exit_code == 0
    found = read_csv(Path("pred.csv"))
    assert list(found) == [*(f"prob_{k}" for k in range(4)), "label", "entropy", "mutual_information"]
    probs = np.stack([found[f"prob_{k}"] for k in range(4)], 1)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)
    assert (found["label"] == probs.argmax(1)).all()
    np.testing.assert_allclose(found["entropy"], -(probs * np.log(probs)).sum(1), rtol=1e-4)
    result = invoke("evaluate", *CLASSES, "--data", "test_labels.npz", "--json")
    report, y = json.loads(result.stdout), arrays("test_labels.npz")[1].numpy()
    right = probs.argmax(1) == y
    assert report["mcbn"]["accuracy"] == pytest.approx(right.mean())
    assert report["mcbn"]["nll"] == pytest.approx(-np.log(probs[np.arange(50), y]).mean(), rel=1e-4)
    assert report["mcbn"]["brier"] == pytest.approx(((probs - np.eye(4)[y]) ** 2).sum(1).mean(), rel=1e-4)
    pairs = found["entropy"][~right][:, None] - found["entropy"][right]
    assert report["mcbn"]["error_auroc"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2, rel=1e-4)
    plain = network("classes").eval()(arrays("test_labels.npz")[0]).softmax(1)
    assert report["plain"]["nll"] == pytest.approx(metrics.nll(plain.detach(), y).item(), rel=1e-4)
    assert "plain network" in invoke("evaluate", *CLASSES, "--data", "test_labels.npz").stdout


def test_scores_that_do_not_exist_are_null_and_dashes() -> None:
    bayes = by_hand()
    x, y = arrays("test.npz")
    y[0] = bayes.predict(x).mean[0]  # predicted exactly: no optimum of the log likelihood
    np.savez("exact.npz", x=x.numpy(), y=y.numpy())
    bayes.save("plain.mcbn")
    assert evaluate("--posterior", "plain.mcbn", "--data", "exact.npz")["normalized_percent"]["pll"] is None
    text = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "exact.npz").stdout
    assert re.search(r"PLL .*-$", text, re.MULTILINE)
    bad = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "test.npz", "--coverage", "95")
    assert_refused(bad, "between 0 and 1")


def test_evaluate_needs_targets_and_a_noise_level() -> None:
    options = ("--posterior", "net.mcbn", *MODEL, "--data")
    assert_refused(invoke("evaluate", *options, "test_x.npy"), "--target")
    assert invoke("fit", *FIT, "--out", "untuned.mcbn").exit_code == 0
    assert_refused(
        invoke("evaluate", *MODEL, "--posterior", "untuned.mcbn", "--data", "test.npz"), "knows no noise", "--tune"
    )
    assert evaluate("--posterior", "untuned.mcbn", "--data", "test.npz", "--tune", "val.npz")["tau"] > 0


def test_evaluate_counts_the_intervals_that_the_fit_calibrated() -> None:
    """10 held-out rows are enough for 50 and 90 %; of 95 % nothing is promised, and the table says so."""
    x, y = arrays("val.npz")
    np.savez("few.npz", x=x[:10].numpy(), y=y[:10].numpy())
    assert invoke("fit", *FIT, "--tune", "val.npz", "--calibrate", "few.npz", "--out", "kept.mcbn").exit_code == 0
    report = evaluate("--posterior", "kept.mcbn", "--data", "test.npz")
    x, y = arrays("test.npz")
    pred = by_hand().calibrate(arrays("few.npz")).predict(x)
    for level, calibrated in ((0.5, True), (0.9, True), (0.95, False)):
        low, high = pred.interval(level, calibrated=calibrated)
        assert report["coverage"][f"{level:g}"] == pytest.approx(((low <= y) & (y <= high)).double().mean().item())
    assert report["coverage"]["0.5"] != evaluate("--posterior", "net.mcbn", "--data", "test.npz")["coverage"]["0.5"]
    text = invoke("evaluate", *MODEL, "--posterior", "kept.mcbn", "--data", "test.npz").stdout
    assert "inside the 90 % calibrated interval" in text
    assert "inside the 95 % Gaussian interval" in text
    few = evaluate("--posterior", "kept.mcbn", "--data", "test.npz", "--samples", "9")  # of which nothing was promised
    assert few["calibrated"] == []


def test_evaluate_counts_sets() -> None:
    labels = ("--data", "train_labels.npz", "--task", "classification", "--batch-size", "16", "--out", "sets.mcbn")
    assert invoke("fit", *CLASSES[2:], *labels, "--calibrate", "train_labels.npz").exit_code == 0
    x, y = arrays("test_labels.npz")
    pred = mcbn.MCBN.load("sets.mcbn", network("classes")).predict(x)
    for posterior, kind in (("sets.mcbn", "calibrated set"), (CLASSES[1], "smallest set")):
        shown = ("--posterior", posterior, *CLASSES[2:], "--data", "test_labels.npz", "--coverage", "0.8")
        report = json.loads(invoke("evaluate", *shown, "--json").stdout)
        if kind == "calibrated set":
            held = pred.set(0.8).gather(1, y.unsqueeze(1)).double().mean().item()
            assert report["coverage"]["0.8"] == pytest.approx(held)
        assert report["calibrated"] == ([*report["coverage"]] if kind == "calibrated set" else [])
        assert f"inside the 95 % {kind}" in invoke("evaluate", *shown).stdout
