"""MCBN against its alternatives: temperature, scores, and a whole run on small random networks."""

import csv
import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mcbn import metrics
from mcbn.cli import app
from mcbn.errors import MCBNError
from mcbn.prediction import entropy
from mcbn_study.alternatives import methods, report, run as study
from mcbn_study.alternatives.inputs import SEVERITIES, load_foreign, load_networks, mixture, questions
from mcbn_study.cifar10.profile import Split
from mcbn_study.cifar10.train import Augmented, save_network
from mcbn_study.data.cifar import Images, require_images
from mcbn_study.estimates import class_scores
from mcbn_study.journal import read as read_records
from mcbn_study.networks import CifarResNet, standardize

SETTINGS = {"n_samples": 4, "batch_size": 8, "n_corrupted": 10}
QUICK = ("plain", "mcbn", "mcbn_linear", "mcbn_gaussian", "mcbn_tuned", "mcbn_joint", "dropout", "abnn", "ensemble")
QUICK += ("thinned_plain", "thinned_mcbn", "thinned_joint")


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Images(x, torch.randint(0, 10, (n,), generator=generator))


DATA = Split(images(48, 1), images(10, 2), images(10, 3))


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Networks of two seeds, with dropout and without, whose running statistics are those of the images."""
    folder = tmp_path_factory.mktemp("networks")
    for seed in (1, 2):
        for dropout in (0.0, 0.1):
            network = CifarResNet(8, dropout=dropout, seed=seed).train()
            for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
                norm.momentum = None  # average over all batches
            with torch.no_grad(), torch.random.fork_rng():
                for _ in range(2):
                    network(torch.stack(Augmented(DATA.train.x).__getitems__(list(range(48)))))
            save_network(network.eval(), folder / f"resnet8-{dropout}-{seed}.safetensors", {"seed": seed})
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "foreign.npz"
    np.savez(path, digits=images(10, 4).x.numpy(), voc=images(10, 5).x.numpy())
    return path


@pytest.fixture(scope="module")
def finished(networks, foreign, tmp_path_factory):
    """A folder with the records, tables and figure of a whole run."""
    out = tmp_path_factory.mktemp("out")
    study.run(networks, out, foreign=foreign, methods=QUICK, data=DATA, **SETTINGS)
    report.write(out)
    return out


def test_the_temperature_is_the_best_of_a_grid():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 200, 5, generator=generator)
    y = torch.where(torch.rand(200, generator=generator) < 0.6, logits.mean(0).argmax(1), 0)
    tau = study.temperature(logits, y)
    grid = [math.exp(step / 100) for step in range(-300, 101)]
    losses = [float(metrics.nll(study.probabilities(logits, t), y)) for t in grid]
    best = grid[losses.index(min(losses))]
    assert tau == pytest.approx(best, rel=0.02)
    assert float(metrics.nll(study.probabilities(logits, tau), y)) <= min(losses) + 1e-9


def test_probabilities_are_averaged_over_draws_never_logits():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    naive = torch.stack([torch.stack([(2.0 * row).double().softmax(0) for row in draw]) for draw in logits]).mean(0)
    torch.testing.assert_close(study.probabilities(logits, 2.0), naive)


def test_aurocs_count_pairs():
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 0])  # the second and the last are wrong; doubts 0.1, 0.4, 0.5, 0.2
    pairs = [(0.4, 0.1), (0.4, 0.5), (0.2, 0.1), (0.2, 0.5)]
    assert class_scores(probs, y)["error_auroc"] == pytest.approx(sum(a > b for a, b in pairs) / 4)
    other = torch.tensor([[0.55, 0.45], [0.99, 0.01]], dtype=torch.float64)
    wins = sum(max(a) < max(b) for a in other.tolist() for b in probs.tolist())  # two classes: doubt goes with entropy
    assert study.ood_auroc(entropy(probs, 1), entropy(other, 1)) == pytest.approx(wins / 8)
    assert class_scores(probs, torch.tensor([0, 0, 0, 1]))["error_auroc"] is None


def test_the_ensemble_is_the_mean_of_its_members(networks):
    found = load_networks(networks)
    members = list(found.plain.values())
    material = make_material(found)
    logits = methods.make("ensemble", replace(material, members=members))(DATA.test.x)
    with torch.no_grad():
        each = [member(standardize(DATA.test.x)).double().softmax(1) for member in members]
    torch.testing.assert_close(study.probabilities(logits), (each[0] + each[1]) / 2, rtol=1e-4, atol=1e-6)


def make_material(found):
    train = study.Augmented(DATA.train.x)
    return methods.Material(found.plain[1], train, DATA.train, DATA.validation, n_samples=4, batch_size=8)


@pytest.mark.slow
def test_each_sampler_gives_its_draws_and_leaves_the_network_alone(networks):
    found = load_networks(networks)
    material = make_material(found)
    before = {name: value.clone() for name, value in material.network.state_dict().items()}
    counts = {"plain": 1, "mcbn": 4, "mcbn_linear": 4, "mcbn_gaussian": 4, "mcbn_tuned": 4, "mcbn_joint": 4}
    counts["dropout"] = 4
    for method, T in counts.items():
        asked = replace(material, network=found.thinned[1]) if method == "dropout" else material
        sampler = methods.make(method, asked)
        logits = sampler(DATA.test.x)
        assert logits.shape == (T, 10, 10)
        assert torch.equal(logits, sampler(DATA.test.x))
        if T > 1:
            assert float(logits.std(0).mean()) > 0
    assert all(torch.equal(before[name], value) for name, value in material.network.state_dict().items())
    with torch.no_grad():
        plain = material.network(standardize(DATA.test.x))
    torch.testing.assert_close(methods.make("plain", material)(DATA.test.x)[0], plain)


def test_methods_on_the_dropout_network_are_those_of_that_network(networks):
    found = load_networks(networks)
    tasks = study.tasks(found, DATA, ["plain", "mcbn", "thinned_plain", "thinned_mcbn"], 4, 8)
    logits = {method: methods.make(method, material)(DATA.test.x) for method, material, seed in tasks if seed == 1}
    with torch.no_grad():
        thinned = found.thinned[1](standardize(DATA.test.x))
    torch.testing.assert_close(logits["thinned_plain"][0], thinned)
    assert not torch.allclose(logits["thinned_plain"], logits["plain"])
    own = methods.Material(found.thinned[1], study.Augmented(DATA.train.x), DATA.train, DATA.validation)
    alone = methods.make("mcbn", replace(own, n_samples=4, batch_size=8, seed=1))(DATA.test.x)
    torch.testing.assert_close(logits["thinned_mcbn"], alone)


def test_the_tuned_batch_size_has_the_least_validation_nll(networks):
    material = make_material(load_networks(networks))
    posterior, y = material.bayes.posterior, DATA.validation.y
    losses = {}
    for M in (2, 4, 8, 16, 32, 64, 128):
        twin = material.bayes.with_posterior(posterior.at_batch_size(M))
        probs = twin.predict(standardize(DATA.validation.x), n_samples=1).probs
        losses[M] = float(metrics.nll(probs, y))
    methods.make("mcbn_tuned", material)
    assert material.chosen["mcbn_tuned"] == min(losses, key=losses.get)


@pytest.mark.slow
def test_batch_size_and_temperature_are_chosen_together(networks):
    network, x = load_networks(networks).plain[1], standardize(DATA.validation.x)
    with torch.no_grad():
        network.last.weight *= 20  # surer than it is right, so that tau matters
        y = torch.multinomial((network(x) / 4).softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    material = replace(make_material(load_networks(networks)), network=network, validation=Images(DATA.validation.x, y))
    posterior = material.bayes.posterior
    losses = {}
    for M in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        logits = material.bayes.with_posterior(posterior.at_batch_size(M)).sample(x, n_samples=1)  # T / 4
        probs = study.probabilities(logits, study.temperature(logits, y))
        losses[M] = float(metrics.nll(probs, y))
    sampler = methods.make("mcbn_joint", material)
    assert material.chosen["mcbn_joint"] == min(losses, key=losses.get)
    twin = material.bayes.with_posterior(posterior.at_batch_size(material.chosen["mcbn_joint"]))
    assert torch.equal(sampler(DATA.test.x), twin.sample(standardize(DATA.test.x)))
    assert material.bayes.posterior is posterior  # the other modes keep their draws
    assert material.bayes.tau == 1


@pytest.mark.slow
def test_every_method_seed_and_set_has_its_record(finished):
    records = read_records(finished / "records.jsonl")
    found = {(r["method"], r["seed"], r["data"], r["tempered"]) for r in records if r["kind"] == "score"}
    sets = ["validation", "test", *(f"corrupted {s}" for s in SEVERITIES), "digits", "voc"]
    runs = [(m, seed) for m in QUICK if m != "ensemble" for seed in (1, 2)] + [("ensemble", None)]
    assert found == {(m, seed, data, t) for m, seed in runs for data in sets for t in (False, True)}
    for r in records:
        assert {"commit", "device", "hardware", "config_hash"} <= set(r)
        if r["kind"] == "score":
            assert ("nll" in r) == (r["data"] not in ("digits", "voc"))
            assert ("ood_auroc" in r) == (r["data"] not in ("validation", "test"))
            assert r["tempered"] or r["tau"] == 1
    assert {r["method"] for r in records if r["kind"] == "cost" and r["milliseconds"] > 0} == {*QUICK, "dropout_usual"}


@pytest.mark.slow
def test_plain_scores_are_those_of_the_network_itself(finished, networks):
    network = load_networks(networks).plain[2]
    with torch.no_grad():
        probs = network(standardize(DATA.test.x)).double().softmax(1)
    rows = read_records(finished / "records.jsonl")
    keys = {"kind": "score", "method": "plain", "seed": 2, "data": "test", "tempered": False}
    (r,) = [r for r in rows if keys.items() <= r.items()]
    assert r["nll"] == pytest.approx(float(-probs.log().gather(1, DATA.test.y[:, None]).mean()), rel=1e-5)
    assert r["accuracy"] == pytest.approx(float((probs.argmax(1) == DATA.test.y).double().mean()))


@pytest.mark.slow
def test_what_is_finished_is_not_measured_again(finished, networks, foreign, monkeypatch):
    lines = (finished / "records.jsonl").read_text().splitlines()
    kept = [line for line in lines if not {"method": "mcbn", "seed": 2}.items() <= json.loads(line).items()]
    (finished / "records.jsonl").write_text("\n".join(kept) + "\n")
    made = []
    real = methods.make
    monkeypatch.setattr(methods, "make", lambda method, material: made.append(method) or real(method, material))
    study.run(networks, finished, foreign=foreign, methods=QUICK, data=DATA, **SETTINGS)
    assert made == ["mcbn"]

    def values(text):
        drop = ("seconds", "date")
        return sorted(json.dumps({k: v for k, v in json.loads(line).items() if k not in drop}) for line in text)

    assert values((finished / "records.jsonl").read_text().splitlines()) == values(lines)


@pytest.mark.slow
def test_the_best_mode_is_chosen_on_validation_images_alone(finished):
    found = read_records(finished / "records.jsonl")
    results = report.Results(found)
    assert set(results.best) == {(best, seed) for best in report.MODES for seed in (1, 2)}
    for (best, seed), mode in results.best.items():
        losses = {m: results.scores[m, seed, "validation"]["nll"] for m in report.MODES[best]}
        assert losses[mode] == min(losses.values())
        assert results.scores[best, seed, "test"] is results.scores[mode, seed, "test"]
    worse = [r | {"nll": 99.0} if r["data"] == "test" else r for r in found if r["kind"] == "score"]
    assert report.Results(worse).best == results.best


@pytest.mark.slow
def test_tables_hold_the_records_and_say_who_wins(finished):
    rows = list(csv.DictReader((finished / "summary.csv").read_text().splitlines()))
    records = read_records(finished / "records.jsonl")
    for r in rows[:50]:
        if r["metric"] == "nll" and r["method"] == "mcbn":
            wanted = {"method": "mcbn", "seed": int(r["seed"]), "data": r["data"], "tempered": r["tempered"] == "true"}
            (one,) = [x for x in records if x["kind"] == "score" and wanted.items() <= x.items()]
            assert float(r["value"]) == pytest.approx(one["nll"])
    assert {"mcbn_best", "ensemble"} <= {r["method"] for r in rows}
    text = (finished / "table.md").read_text()
    assert "Deep ensemble" in text
    assert all(f"| {name} |" in text for name in ("MC dropout", "MC dropout, tempered", "MCBN, tuned M and tau"))
    assert "Last-layer Laplace" not in text  # was not measured
    assert (finished / "severity.png").stat().st_size > 10_000


def test_bad_input_is_named(networks, foreign, tmp_path):
    options = {"data": DATA, **SETTINGS}
    with pytest.raises(MCBNError, match=r"method must be one of \['plain', 'mcbn'.*got 'swag'"):
        study.run(networks, tmp_path, methods=["swag"], **options)
    with pytest.raises(MCBNError, match="holds no network without dropout; train them"):
        study.run(tmp_path, tmp_path, **options)
    with pytest.raises(MCBNError, match=r"there is no .*none.npz; make it with"):
        study.run(networks, tmp_path, foreign=tmp_path / "none.npz", **options)
    with pytest.raises(MCBNError, match="holds no records; make them with `mcbn reproduce alternatives`"):
        report.write(tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros((2, 28, 28), np.uint8),
            r"RGB bytes, uint8 of shape \(N, 3, 32, 32\); got uint8 of shape \(2, 28, 28\)",
        ),
        (np.zeros((2, 3, 28, 28), np.uint8), r"of shape \(N, 3, 32, 32\); got uint8 of shape \(2, 3, 28, 28\)"),
        (np.zeros((2, 3, 32, 32), np.float32), r"RGB bytes.*got float32 of shape \(2, 3, 32, 32\)"),
    ],
)
def test_foreign_images_of_another_size_or_mode_are_refused(tmp_path, array, message):
    np.savez(tmp_path / "images.npz", other=array)
    with pytest.raises(MCBNError, match=message):
        load_foreign(tmp_path / "images.npz")


def test_ensembles_and_dropout_need_their_networks(networks, tmp_path):
    network = load_networks(networks).plain[1]
    save_network(network, tmp_path / "one.safetensors", {"seed": 1})
    with pytest.raises(MCBNError, match="at least 2 seeds; there are 1"):
        study.run(tmp_path, tmp_path, methods=["ensemble"], data=DATA)
    with pytest.raises(MCBNError, match="networks trained with dropout, of which there is none"):
        study.run(tmp_path, tmp_path, methods=["dropout"], data=DATA)
    with pytest.raises(MCBNError, match="thinned_mcbn needs networks trained with dropout"):
        study.run(tmp_path, tmp_path, methods=["thinned_mcbn"], data=DATA)


def test_laplace_names_its_extra_and_is_left_out_where_it_is_missing(networks, monkeypatch):
    found = load_networks(networks)
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    with pytest.raises(MCBNError, match=r"laplace needs laplace-torch; pip install 'mcbn\[laplace\]'"):
        study.choose(["laplace"], found)
    with pytest.warns(UserWarning, match=r"laplace is left out: .*mcbn\[laplace\]"):
        assert study.choose([], found) == [m for m in methods.METHODS if m != "laplace"]


@pytest.mark.slow
def test_last_layer_laplace_is_laplace_torch_on_the_whole_network(networks):
    """The posterior of the last layer, fitted to its inputs, against laplace-torch's own last-layer mode."""
    laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    network = load_networks(networks).plain[1]
    x, y = standardize(DATA.train.x), DATA.train.y
    ours = methods.last_layer(network, [x[:20], x[20:]], y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = laplace.Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        theirs.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=48))
        theirs.optimize_prior_precision(method="marglik")
        expected = theirs(standardize(DATA.test.x), pred_type="glm", link_approx="probit")
    torch.testing.assert_close(ours(standardize(DATA.test.x))[0].exp(), expected, rtol=1e-3, atol=1e-4)


def test_questions_cover_test_corrupted_and_foreign_images(foreign):
    sets = questions(DATA.test, foreign, n_test=8, n_corrupted=5)
    assert {name: len(x) for name, (x, _) in sets.items()} == {
        "test": 8,
        **{f"corrupted {s}": 5 for s in SEVERITIES},
        "digits": 10,
        "voc": 10,
    }
    assert torch.equal(sets["corrupted 2"][0], mixture(DATA.test.x[:5], 2))
    assert torch.equal(sets["corrupted 2"][1], DATA.test.y[:5])
    assert sets["voc"][1] is None


@pytest.mark.slow
def test_the_command_writes_the_tables_of_what_is_recorded(finished):
    result = CliRunner().invoke(app, ["reproduce", "alternatives", "--out", str(finished), "--no-measure"])
    assert result.exit_code == 0, result.output
    assert "table.md" in result.output
    result = CliRunner().invoke(app, ["reproduce", "alternatives", "--networks", "nowhere", "--methods", "swag"])
    assert result.exit_code == 2


def test_require_images_names_both_sizes():
    with pytest.raises(MCBNError, match=r"of shape \(N, 3, 32, 32\); got uint8 of shape \(5, 3, 16, 16\)"):
        require_images(images(5).x[:, :, :16, :16], (3, 32, 32))
    assert SEVERITIES == (1, 2, 3, 4, 5)
