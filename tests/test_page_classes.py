"""The report of a classification, of a segmentation, and of any network of images."""

import math
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch import nn

import mcbn
from mcbn import metrics
from mcbn.page import evidence, examples, scores, templates, write_page
from pages import EVIL, Reader, assert_offline


def settle(network: nn.Module, x: torch.Tensor) -> nn.Module:
    """Bring the running statistics to those of x, as training would."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    with torch.no_grad():
        network.train()(x)
    return network.eval()


def images(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=generator)
    return torch.randn(n, 1, 8, 8, generator=generator) + y[:, None, None, None], y


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    network, (x, y) = nn.Sequential(*body), images(200, 0)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return mcbn.MCBN(settle(network, x), "classification").fit(x, n_samples=50, batch_size=50), x


def test_classification_page_scores_agree_with_the_metrics(classifier, tmp_path: Path):
    bayes, train = classifier
    x, y = images(100, 1)
    page = Reader(write_page(tmp_path / "page.html", bayes, x, y, train=train, classes=["a", "b", "c"]).read_text())
    assert set(page.blocks) == {"errors", "coverage", "reliability", "risk", "histogram"}
    assert sum(tag == "img" for tag, _ in page.tags) == 12
    ours, plain = evidence.votes(bayes, x, y)
    pred = bayes.predict(x)
    rows = {row.name: row for row in scores.class_scores(ours, plain)}
    softmax = bayes.plain(x).softmax(1)
    named = {
        "Accuracy": metrics.accuracy,
        "Negative log likelihood": metrics.nll,
        "Brier score": metrics.brier,
        "Calibration error (ECE)": metrics.ece,
    }
    for name, metric in named.items():
        assert rows[name].ours == pytest.approx(metric(pred.probs, y).item(), rel=1e-4)
        assert rows[name].twin == pytest.approx(metric(softmax, y).item(), rel=1e-4)
    for name, uncertainty in (("entropy at finding the wrong ones", pred.entropy), ("mutual information at it", None)):
        uncertainty = pred.mutual_information if uncertainty is None else uncertainty
        auroc = metrics.auroc(uncertainty, pred.label != y).item()
        assert rows[f"AUROC of {name}"].ours == pytest.approx(auroc, abs=1e-3)
    assert math.isnan(rows["AUROC of mutual information at it"].twin)
    aurc = metrics.aurc(pred.entropy, (pred.label != y).double()).item()
    assert f"(AURC): {templates.number(aurc)}, in the best possible order " in " ".join(page.words)
    assert f"{1 - metrics.accuracy(pred.probs, y).item():.1%} of all 100 points are wrong" in " ".join(page.words)


def test_names_of_classes_and_layers_are_escaped(classifier, tmp_path: Path):
    bayes, _ = classifier
    x, y = images(60, 1)
    write_page(tmp_path / "page.html", bayes, x, y, classes=[EVIL, "b", "c"], title="t")
    text = (tmp_path / "page.html").read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)" in text


def test_inputs_that_are_rows_or_no_tensor_show_what_can_be_shown(tmp_path: Path):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)

        def forward(self, a, b):
            return self.head(self.norm(a + b))

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 40, 4, generator=generator)
    network, y = Sum(), torch.randint(0, 2, (40,), generator=generator)
    network.train()(a, b)
    network.eval()
    data = [{"a": a[i], "b": b[i]} for i in range(40)]
    bayes = mcbn.MCBN(network, "classification").fit(data, n_samples=4, batch_size=10)
    text = write_page(tmp_path / "page.html", bayes, {"a": a, "b": b}, y, classes=["no", "yes"]).read_text()
    assert "Least certain" in text
    assert "<td>yes</td>" in text
    single = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    single.train()(a)
    rows = mcbn.MCBN(single.eval(), "classification").fit(a, n_samples=8, batch_size=10)
    page = Reader(write_page(tmp_path / "rows.html", rows, a, y, names=["p", "q", "r", "s"]).read_text())
    assert {"p", "q", "r", "s", "confidence"} <= set(page.words)


def test_labels_all_ignored_are_refused(classifier, tmp_path: Path):
    x, y = images(10, 1)
    with pytest.raises(mcbn.MCBNError, match="nothing is left"):
        write_page(tmp_path / "page.html", classifier[0], x, torch.full_like(y, 7), ignore_index=7)


def test_segmentation_page_shows_maps_and_leaves_the_void_out(tmp_path: Path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, 12, 12, generator=generator)
    y = torch.randint(0, 3, (20, 12, 12), generator=generator)
    y[:, :2] = 255
    bayes = mcbn.MCBN(settle(network, x), "classification").fit(x, n_samples=10, batch_size=8)
    page = Reader(write_page(tmp_path / "page.html", bayes, x, y, ignore_index=255).read_text())
    assert f"{20 * 10 * 12:,} points of 20 inputs" in " ".join(page.words)
    assert sum(tag == "img" for tag, _ in page.tags) == 12 * 4 + 5  # input, truth, answer, entropy; the key of colors
    assert {"class 0", "class 1", "class 2", "left out", "entropy, 0 to 1.10 nats"} <= set(page.words)
    ours, _ = evidence.votes(bayes, x, y, ignore_index=255)
    kept = y != 255
    assert ours.right.mean() == pytest.approx((bayes.predict(x).label == y)[kept].double().mean().item())


def segmented(seed: int = 0) -> tuple[mcbn.MCBN, torch.Tensor, torch.Tensor]:
    """A network of maps, 20 images of 12 x 12 and their labels."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 3, 12, 12, generator=generator)
    y = torch.randint(0, 3, (20, 12, 12), generator=generator)
    return mcbn.MCBN(settle(network, x), "classification").fit(x, n_samples=10, batch_size=4), x, y


def test_of_too_many_pixels_a_random_part_is_scored_and_the_page_says_so(tmp_path: Path, monkeypatch):
    bayes, x, y = segmented()
    y[:, :2] = 255
    whole, _ = evidence.votes(bayes, x, y, ignore_index=255)
    monkeypatch.setattr(evidence, "MOST_SCORED", 600)
    ours, plain = evidence.votes(bayes, x, y, ignore_index=255)
    assert ours.population == len(whole.error) == 20 * 10 * 12
    assert abs(len(ours.error) - 600) < 4 * (600 * 0.75) ** 0.5  # a binomial number of points
    assert np.array_equal(ours.inputs, plain.inputs)
    assert len(np.unique(ours.inputs)) == 20
    assert set(ours.entropy) <= set(whole.entropy)
    text = " ".join(Reader(write_page(tmp_path / "page.html", bayes, x, y, ignore_index=255).read_text()).words)
    assert f"{len(ours.error):,} of the 2,400 points, chosen at random, of 20 inputs" in text


def test_images_are_predicted_a_few_at_a_time(monkeypatch):
    _, x, y = segmented()
    monkeypatch.setattr(evidence, "VALUES", 3 * 3 * 12 * 12)
    sizes = [len(block) for _, block in evidence._blocks(x, len(y))]
    assert sizes == [3] * 6 + [2]


def test_checks_of_large_inputs_take_few_examples_and_the_page_says_so(tmp_path: Path, monkeypatch):
    bayes, x, y = segmented()
    full = write_page(tmp_path / "full.html", bayes, x, y, train=x).read_text()
    assert "Compared with" not in full
    monkeypatch.setattr(evidence, "VALUES_CHECKED", 7 * 3 * 12 * 12)
    text = write_page(tmp_path / "page.html", bayes, x, y, train=x).read_text()
    assert "Compared with 8 of the 20 training examples, chosen at random." in text  # two batches of 4


def test_dense_regression_counts_every_pixel(tmp_path: Path):
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    bayes = mcbn.MCBN(settle(network, x), "regression").fit(x, n_samples=10, batch_size=6).tune((x, x))
    spread = evidence.spread(bayes, x, x)
    assert len(spread.error) == 12 * 36
    assert np.bincount(spread.inputs).tolist() == [36] * 12
    assert "432 points of 12 inputs" in write_page(tmp_path / "page.html", bayes, x, x).read_text()


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_pictures_are_what_a_png_reader_reads(shape):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with urlopen(examples.tile(pixels)["address"]) as file:
        assert np.array_equal(np.asarray(image.open(file)), pixels)


def test_page_has_no_address_but_its_own_data(classifier, tmp_path: Path):
    model, train = classifier
    assert_offline(write_page(tmp_path / "page.html", model, *images(60, 1), train=train).read_text())


def test_too_few_class_names_are_refused(classifier, tmp_path: Path):
    with pytest.raises(mcbn.MCBNError, match="classes holds 1 names"):
        write_page(tmp_path / "page.html", classifier[0], *images(60, 1), classes=["a"])
