"""`mcbn fit --calibrate`, `mcbn predict --risk`, `mcbn evaluate --compare`: the library's own numbers."""

from pathlib import Path

import numpy as np
import pytest

import mcbn
from command_line import CLASSES, FIT, MODEL, arrays, assert_refused, by_hand, invoke, network, predict

pytestmark = pytest.mark.usefixtures("at_work")


def test_calibrated_intervals_are_written() -> None:
    assert invoke("fit", *FIT, "--tune", "val.npz", "--calibrate", "test.npz", "--out", "kept.mcbn").exit_code == 0
    options = ("--data", "val.npz", "--coverage", "0.8", "--out", "p.npz")
    result = invoke("predict", "--posterior", "kept.mcbn", *MODEL, *options)
    assert result.exit_code == 0, result.output
    pred = by_hand().calibrate(arrays("test.npz")).predict(arrays("val.npz")[0])
    low, high = pred.interval(0.8)
    with np.load("p.npz") as file:
        np.testing.assert_allclose(file["low"], low.numpy(), rtol=1e-5)
        np.testing.assert_allclose(file["high"], high.numpy(), rtol=1e-5)


def test_calibrated_intervals_are_exported() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert invoke("fit", *FIT, "--tune", "val.npz", "--calibrate", "test.npz", "--out", "kept.mcbn").exit_code == 0
    options = ("--data", "val.npz", "--coverage", "0.8", "--out", "net.onnx")
    result = invoke("export", "--posterior", "kept.mcbn", *MODEL, *options)
    assert result.exit_code == 0, result.output
    x = arrays("val.npz")[0]
    session = onnxruntime.InferenceSession("net.onnx")
    low = session.run(["low"], {"x": x.numpy()})[0]
    pred = by_hand().calibrate(arrays("test.npz")).predict(x)
    np.testing.assert_allclose(low, pred.interval(0.8)[0].numpy(), rtol=1e-3, atol=1e-4)


def test_rows_to_ask_a_human_are_marked() -> None:
    labels = ("--data", "train_labels.npz", "--task", "classification", "--batch-size", "16", "--out", "sets.mcbn")
    assert invoke("fit", *CLASSES[2:], *labels, "--calibrate", "train_labels.npz").exit_code == 0
    options = ("--data", "train_labels.npz", "--risk", "0.9", "--out", "p.npz")
    result = invoke("predict", "--posterior", "sets.mcbn", *CLASSES[2:], *options)
    assert result.exit_code == 0, result.output
    x, y = arrays("train_labels.npz")
    bayes = mcbn.MCBN.load("sets.mcbn", network("classes"))
    pred = bayes.predict(x)
    with np.load("p.npz") as file:
        assert np.array_equal(file["set"], pred.set(0.95).numpy())
        assert np.array_equal(file["ask_human"], pred.reject(0.9).numpy())
    result = invoke("predict", "--posterior", "sets.mcbn", *CLASSES[2:], *options[:-1], "p.csv")
    assert "ask_human" in Path("p.csv").read_text().splitlines()[0]
    assert len(y) == len(pred.label)


def test_risk_needs_a_calibration() -> None:
    result = predict("--data", "test.npz", "--risk", "0.1", "--tolerance", "1", "--out", "p.npz")
    assert_refused(result, "reject needs errors on held-out data")
    result = predict("--data", "test.npz", "--tolerance", "1", "--out", "p.npz")
    assert_refused(result, "--tolerance says what --risk counts as an error")


def test_compare_prints_the_table_of_the_library() -> None:
    test = ("--posterior", "net.mcbn", *MODEL, "--data", "test.npz", "--compare")
    result = invoke("evaluate", *test, "--tune", "val.npz")
    assert result.exit_code == 0, result.output
    compared = mcbn.compare(by_hand(), arrays("val.npz"), arrays("test.npz"))
    assert result.stdout.splitlines()[-1] == compared.advice
    assert result.stdout.splitlines()[0].split()[:2] == ["CRPS", "ECE"]
    assert_refused(invoke("evaluate", *test), "--compare needs validation data by --tune")
