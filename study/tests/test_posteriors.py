"""Families of q(omega) on saved networks: records, the choice of M', tables, and the foreign network."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mcbn import MCBN, metrics, noise
from mcbn.cli import app
from mcbn.data import Regression, folds, load, split
from mcbn.errors import MCBNError
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study.data.cifar import Images
from mcbn_study.foreign import run as foreign
from mcbn_study.journal import CellJournal, read as read_records
from mcbn_study.networks import cifar_resnet
from mcbn_study.posteriors import report, run as posteriors
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression.measure import score_gaussian, score_run, with_bounds
from mcbn_study.regression.profile import QUICK
from mcbn_study.regression.train import load_networks, save_networks

TINY = replace(QUICK, name="tiny", datasets=("boston",), splits=(1, 2), seeds=(1, 2), n_folds=2, n_samples=20)
M = 32


def train(rows, seed):
    data = load("boston")
    x, y = data.x[rows].float(), data.y[rows].float()
    network = Standardized(RegressionMLP(x.shape[1], (8, 8), seed=seed), x, y)
    train_regression(network, x, y, batch_size=M, epochs=10, weight_decay=1e-4, seed=seed)
    return {name: value for name, value in network.network.state_dict().items() if "tracked" not in name}


def make_study(folder):
    """Write what `mcbn reproduce regression` leaves of its MCBN networks."""
    n = len(load("boston").y)
    config = {"weight_decay": 1e-4, "batch_size": M, "dropout": None, "epochs": 10}
    base = {"dataset": "boston", "config": config, "tau": 0.1, "tau_constant": 0.08}
    final = [{**base, "split": s, "seed": k} for s in TINY.splits for k in TINY.seeds]
    parts = [{**base, "split": s, "fold": f, "n_folds": 2} for s in TINY.splits for f in range(2)]
    states = [train(split(n, info["split"]).train, info["seed"]) for info in final]
    save_networks(folder / "networks" / "boston.safetensors", states, final)
    states = [train(folds(split(n, info["split"]).train, 2)[info["fold"]].train, 1) for info in parts]
    save_networks(folder / "networks" / "boston_folds.safetensors", states, parts)
    CellJournal(folder, TINY.settings())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with the comparison of one small study."""
    folder = tmp_path_factory.mktemp("study")
    make_study(folder / "regression")
    posteriors.run(TINY, folder / "posteriors", regression=folder / "regression")
    return folder


def test_every_family_of_every_network_has_its_record(study):
    records = read_records(study / "posteriors" / "records.jsonl")
    found = [(r["family"], r["split"], r["seed"]) for r in records]
    runs = [(s, k) for s in TINY.splits for k in TINY.seeds]
    assert sorted(found) == sorted((family, *run) for family in posteriors.FAMILIES for run in runs)
    for r in records:
        assert (r["kind"], r["study"], r["n_train"], r["n_test"]) == ("posterior", "posteriors", 405, 101)
        assert r["config_hash"] == TINY.hash
        assert min(r["fit_seconds"], r["predict_seconds"], r["bytes"]) > 0
        if r["family"] != "tuned":
            assert (r["tau"], r["config"]["posterior_batch_size"]) == (0.1, M)


def test_the_study_gains_its_three_methods(study):
    tests = [r for r in read_records(study / "regression" / "records.jsonl") if r["kind"] == "test"]
    assert len(tests) == 3 * 4
    own = {(r["family"], r["split"], r["seed"]): r for r in read_records(study / "posteriors" / "records.jsonl")}
    for r in tests:
        twin = own[posteriors.METHODS[r["method"]], r["split"], r["seed"]]
        names = ("rmse", "crps", "pll", "crps_constant", "crps_optimum", "crps_normalized", "tau", "config")
        assert [r[name] for name in names] == [twin[name] for name in names]
        assert (r["study"], r["profile"], r["config_hash"]) == ("regression", "tiny", TINY.hash)


def test_sampled_scores_are_those_of_a_loop_over_the_draws(study):
    network, info = load_networks(study / "regression" / "networks" / "boston.safetensors")[1]
    data, tau = load("boston"), info["tau"]
    test = split(len(data.y), 1).test
    bayes = MCBN(network, "regression").fit(data.x[info["train"]].float(), n_samples=20, batch_size=M, seed=2)
    drawn = torch.stack([bayes.sample(data.x[test][i : i + 1].float()).flatten() for i in range(len(test))], 1).double()
    normal = torch.distributions.Normal(drawn, tau**-0.5)
    pll = (normal.log_prob(data.y[test]).exp().mean(0)).log().mean()
    (r,) = [r for r in read_records(study / "posteriors" / "records.jsonl") if _is(r, "sample", 1, 2)]
    assert r["pll"] == pytest.approx(float(pll), rel=1e-4)
    assert r["rmse"] == pytest.approx(float((drawn.mean(0) - data.y[test]).square().mean().sqrt()), rel=1e-5)
    constant = metrics.crps_gaussian(drawn.mean(0), torch.full((len(test),), 1 / 0.08), data.y[test]).mean()
    assert r["crps_constant"] == pytest.approx(float(constant), rel=1e-5)
    (r,) = [r for r in read_records(study / "posteriors" / "records.jsonl") if _is(r, "plain_mean", 1, 2)]
    plain = network.eval()(data.x[test].float()).detach().flatten().double()
    crps = metrics.crps_gaussian(plain, drawn.var(0, correction=0) + 1 / tau, data.y[test]).mean()
    assert r["rmse"] == pytest.approx(float((plain - data.y[test]).square().mean().sqrt()), rel=1e-5)
    assert r["crps"] == pytest.approx(float(crps), rel=1e-4)


def _is(record, family, number, seed):
    return (record["family"], record["split"], record["seed"]) == (family, number, seed)


def test_all_families_of_a_run_share_the_bounds_of_the_sampled_draws(study):
    records = read_records(study / "posteriors" / "records.jsonl")
    for s, k in [(1, 1), (2, 2)]:
        run = {r["family"]: r for r in records if (r["split"], r["seed"]) == (s, k)}
        for r in run.values():
            low, high = run["sample"]["crps_constant"], run["sample"]["crps_optimum"]
            assert r["crps_normalized"] == pytest.approx(100 * (r["crps"] - low) / (high - low))
        by_score = sorted(run, key=lambda family: run[family]["crps"])
        assert by_score == sorted(run, key=lambda family: -run[family]["crps_normalized"])


def test_a_gaussian_scores_as_infinitely_many_of_its_draws():
    generator = torch.Generator().manual_seed(0)
    mean, y = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    variance = torch.rand(7, generator=generator, dtype=torch.float64)
    draws = mean + variance.sqrt() * torch.randn(200_000, 7, generator=generator, dtype=torch.float64)
    exact, many = score_gaussian(mean, variance, y, 2.0, 1.5), score_run(draws, y, 2.0, 1.5)
    for name in ("rmse", "crps", "pll"):  # the standard error of the draws' mean is below 1 / sqrt(200,000)
        assert exact[name] == pytest.approx(many[name], abs=0.01), name
    naive = torch.distributions.Normal(mean, (variance + 0.5).sqrt()).log_prob(y).mean()
    assert exact["pll"] == pytest.approx(float(naive), rel=1e-12)


def test_bounds_of_a_prediction_itself_change_nothing():
    scores = score_gaussian(torch.zeros(3), torch.ones(3), torch.tensor([0.1, -2.0, 0.7]), 2.0, 1.5)
    assert with_bounds(scores, scores) == scores


def test_predictions_are_written_for_each_split(study):
    for method in posteriors.METHODS:
        for s in TINY.splits:
            arrays = np.load(study / "regression" / "predictions" / f"boston-{method}-{s}.npz")
            assert arrays["error"].shape == arrays["std"].shape == (2, 101)
            assert (arrays["std"] > 0).all()
    records = read_records(study / "posteriors" / "records.jsonl")
    (r,) = [r for r in records if _is(r, "linear", 2, 1)]
    error = np.load(study / "regression" / "predictions" / "boston-mcbn_linear-2.npz")["error"][0]
    assert math.sqrt((error.astype(float) ** 2).mean()) == pytest.approx(r["rmse"], rel=1e-3)


def test_the_chosen_batch_size_has_the_least_validation_crps(study):
    data = load("boston")
    networks = load_networks(study / "regression" / "networks" / "boston_folds.safetensors")[:2]
    batch_size, tau = posteriors.choose_batch_size(networks, data, 20)
    best = dict.fromkeys(noise.candidates("auto", M), math.inf)
    low, high = TAU_RANGES["boston"]
    for candidate in best:
        for other in np.geomspace(low, high, 80):
            best[candidate] = min(best[candidate], naive_crps(networks, data, candidate, float(other)))
    assert batch_size == min(best, key=best.get)
    assert low <= tau <= high
    assert naive_crps(networks, data, batch_size, tau) == pytest.approx(best[batch_size], rel=2e-3)


def naive_crps(networks, data, candidate, tau, kept={}):  # noqa: B006
    """Average CRPS within, then over the folds; predictions are kept between calls."""
    found = []
    for network, info in networks:
        rows = folds(split(len(data.y), info["split"]).train, 2)[info["fold"]].validation
        key = (info["fold"], candidate)
        if key not in kept:
            bayes = MCBN(network, "regression").fit(
                data.x[info["train"]].float(), n_samples=20, batch_size=M, seed=info["fold"]
            )
            bayes.posterior = bayes.posterior.at_batch_size(candidate)
            kept[key] = bayes.predict(data.x[rows].float())
        mean, variance = (part.flatten().double() for part in (kept[key].mean, kept[key].epistemic))
        found.append(float(metrics.crps_gaussian(mean, variance + 1 / tau, data.y[rows]).mean()))
    return sum(found) / len(found)


def test_the_choice_never_sees_test_targets(study):
    data = load("boston")
    networks = load_networks(study / "regression" / "networks" / "boston_folds.safetensors")[:2]
    spoiled = data.y.clone()
    spoiled[split(len(data.y), 1).test] = 1e6
    before, after = (posteriors.choose_batch_size(networks, Regression(data.x, y), 20) for y in (data.y, spoiled))
    assert before == after
    spoiled[split(len(data.y), 1).train[:5]] = 1e6
    assert posteriors.choose_batch_size(networks, Regression(data.x, spoiled), 20) != before


@pytest.mark.slow
def test_what_is_finished_is_not_repeated_and_what_was_lost_comes_again(study):
    paths = [study / name / "records.jsonl" for name in ("posteriors", "regression")]
    before = [path.read_text() for path in paths]
    posteriors.run(TINY, study / "posteriors", regression=study / "regression", datasets=("boston",))
    assert [path.read_text() for path in paths] == before
    paths[0].write_text("".join(before[0].splitlines(keepends=True)[:-3]))
    posteriors.run(TINY, study / "posteriors", regression=study / "regression")
    assert paths[1].read_text() == before[1]
    old, new = ([json.loads(line) for line in text.splitlines()] for text in (before[0], paths[0].read_text()))
    assert [r["crps"] for r in old] == [r["crps"] for r in new]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["plain_mean", "linear_gaussian", "tuned", "diagonal"])
def test_a_family_that_is_missing_is_measured_alone(study, family, tmp_path, monkeypatch):
    folder, fits = Path(shutil.copytree(study, tmp_path / "study")), []
    path = folder / "posteriors" / "records.jsonl"
    records = read_records(path)
    path.write_text("".join(json.dumps(r) + "\n" for r in records if r["family"] != family))
    predictions = {p: p.read_bytes() for p in (folder / "regression" / "predictions").iterdir()}
    fit = posteriors._fit
    monkeypatch.setattr(posteriors, "_fit", lambda *given: (fits.append(given[5:]), fit(*given))[1])
    posteriors.run(TINY, folder / "posteriors", regression=folder / "regression")
    again = read_records(path)
    assert again[: -len(records) // 9] == [r for r in records if r["family"] != family]
    scores = [[r["crps"], r["crps_normalized"]] for r in records if r["family"] == family]
    assert [[r["crps"], r["crps_normalized"]] for r in again[-len(scores) :]] == scores
    drawn = {"linear_gaussian": ("gaussian",), "diagonal": ("diagonal",)}.get(family, ())
    assert {kind for kind, *_ in filter(None, fits)} == {"sample", *drawn}
    changed = {p for p, content in predictions.items() if p.read_bytes() != content}
    assert not changed or family == "tuned"


def test_unknown_data_sets_and_missing_networks_are_named(tmp_path):
    with pytest.raises(MCBNError, match=r"data set must be one of \['boston'.*got 'boson'"):
        posteriors.run(TINY, tmp_path / "p", regression=tmp_path, datasets=("boson",))
    with pytest.raises(MCBNError, match="mcbn reproduce regression --datasets concrete --methods mcbn --out"):
        posteriors.run(TINY, tmp_path / "p", regression=tmp_path, datasets=("concrete",))
    with pytest.raises(MCBNError, match=r"boston\.safetensors; make it with `mcbn reproduce regression"):
        posteriors.run(TINY, tmp_path / "p", regression=tmp_path)
    result = CliRunner().invoke(
        app, ["reproduce", "posteriors", "--datasets", "wine", "--regression", str(tmp_path), "--out", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert "wine.safetensors; make it with `mcbn reproduce regression" in result.output
    assert not list(tmp_path.iterdir())


def test_fold_networks_are_needed_too(tmp_path):
    (tmp_path / "networks").mkdir()
    (tmp_path / "networks" / "boston.safetensors").write_bytes(b"")
    with pytest.raises(MCBNError, match=r"no .*boston_folds.safetensors; make it with"):
        posteriors.run(TINY, tmp_path / "p", regression=tmp_path)


def made(family, crps, dataset="boston"):
    """Make records of one split whose seeds have these CRPS."""
    common = {"kind": "posterior", "dataset": dataset, "family": family, "split": 1, "tau": 1.0, "config_hash": "x"}
    costs = {"fit_seconds": 0.1, "predict_seconds": 0.01, "bytes": 1000, "n_train": 405, "n_test": 101, "device": "cpu"}
    scores = {"rmse": 1.0, "pll": -1.0, "crps_normalized": None, "pll_normalized": 2.0}
    config = {"config": {"posterior_batch_size": 32 if family == "sample" else 64}}
    return [{**common, "seed": k, "crps": value, **scores, **costs, **config} for k, value in enumerate(crps)]


def test_relative_crps_is_paired_and_judged_against_the_target():
    own = report.collect([*made("sample", [1.0, 3.0]), *made("gaussian", [1.01, 3.05]), *made("tuned", [0.9, 2.7])])
    gap = report.relative(own["boston", "gaussian"], own["boston", "sample"])
    differences = [100 * 0.01 / 2, 100 * 0.05 / 2]
    assert gap.mean == pytest.approx(100 * (4.06 / 4.0 - 1))
    assert gap.standard_error == pytest.approx(np.std(differences, ddof=1) / math.sqrt(2))
    assert "| Boston Housing | +1.50 ± 1.00 | -10.00 ± 5.00 | not reached |" in report.page(own)
    near = report.collect([*made("sample", [1.0, 3.0]), *made("gaussian", [1.01, 3.01])])
    assert "| Boston Housing | +0.50 ± 0.00 | reached |" in report.page(near)
    without = report.collect(made("sample", [1.0, 3.0]) + made("tuned", [1.0, 3.0]))
    assert "| Boston Housing | +0.00 ± 0.00 | \N{EN DASH} |" in report.page(without)


def test_tables_come_from_records_alone(study, tmp_path):
    written = report.write(study / "posteriors")
    assert [path.name for path in written] == ["table.md", "table.csv"]
    text = written[0].read_text()
    assert "| Boston Housing |" in text
    assert f"{M} to " in text
    lines = written[1].read_text().splitlines()
    assert lines[0] == "dataset,family,metric,n,mean,standard_error"
    records = [r for r in read_records(study / "posteriors" / "records.jsonl") if r["family"] == "diagonal"]
    (line,) = [line for line in lines if line.startswith("boston,diagonal,crps,")]
    assert float(line.split(",")[4]) == pytest.approx(np.mean([r["crps"] for r in records]))
    with pytest.raises(MCBNError, match="holds no records; make them with `mcbn reproduce posteriors`"):
        report.write(tmp_path)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Random weights under their published names, and a few images in place of CIFAR-10."""

    def few(part):
        generator = torch.Generator().manual_seed(len(part))
        n = 40 if part == "train" else 8
        return Images(
            torch.randint(1, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator), torch.arange(n) % 10
        )

    monkeypatch.setattr(foreign, "cifar10", few)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = cifar_resnet(5).eval()
    state = {name: value.numpy() for name, value in network.state_dict().items() if "tracked" not in name}
    np.savez(tmp_path / "resnet32.npz", **{published(name): value for name, value in state.items()})
    return tmp_path / "resnet32.npz", network


def published(name):
    """Name a tensor of our ResNet-32 as github.com/akamaster/pytorch_resnet_cifar10 does."""
    first, rest = name.split(".", 1)
    if first == "0":
        return rest.replace("0.", "conv1.", 1) if rest.startswith("0.") else rest.replace("1.", "bn1.", 1)
    if first == "18":
        return f"linear.{rest}"
    for ours, theirs in (("first.0", "conv1"), ("first.1", "bn1"), ("second.0", "conv2"), ("second.1", "bn2")):
        rest = rest.replace(ours, theirs)
    layer, block = divmod(int(first) - 2, 5)
    return f"layer{layer + 1}.{block}.{rest}"


def test_published_weights_land_in_their_layers(weights):
    path, network = weights
    loaded, x = foreign.load_resnet(path), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), network(x))


@pytest.mark.slow
def test_crops_are_framed_in_black_before_normalisation():
    image = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    black, white = (foreign.normalise(torch.full((3, 1, 1), v, dtype=torch.uint8)) for v in (0, 255))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crops = torch.stack([foreign.framed_crops(image)[0] for _ in range(300)])
    assert bool(((crops == black) | (crops == white)).all())
    dark = crops[:, 0] == black[0]  # (n, 32, 32)
    assert [int(dark.all(axis).sum(1).max()) for axis in (1, 2)] == [4, 4]  # columns, rows of the frame
    assert (crops == white).flatten(1).all(1).any()


@pytest.mark.slow
def test_the_foreign_network_is_compared_and_gone_on_with(weights, tmp_path):
    file, network = weights
    options = {"batch_size": 4, "n_samples": 2, "n_test": 4}
    with pytest.warns(UserWarning, match="drawn batch statistics disagree"):  # an untrained network
        path = foreign.cifar(file, tmp_path, **options)
    records = read_records(path)
    assert [r["family"] for r in records] == ["plain", "sample", "linear", "gaussian", "layerwise", "diagonal"]
    x = foreign.normalise(foreign.cifar10("test").x[:4])
    with torch.no_grad():
        log_p = network(x).double().log_softmax(1)[range(4), range(4)]
    assert records[0]["pll"] == pytest.approx(float(log_p.mean()), rel=1e-5)
    assert records[0]["pll_error"] == pytest.approx(float(log_p.std() / 2), rel=1e-4)
    assert records[5]["bytes"] < records[1]["bytes"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.warns(UserWarning, match="drawn batch statistics disagree"):
        foreign.cifar(file, tmp_path, **options)
    again = read_records(path)
    assert [(r["family"], r["pll"]) for r in again] == [(r["family"], r["pll"]) for r in records]
    (table,) = report.write(tmp_path)
    assert table.read_text().count("\n| ") == 2 + 6
    assert "(cpu)" not in table.read_text()
    other = [r | {"device": "cuda", "config": r["config"] | {"n_test": 10}} for r in again]
    lines = report.cifar_page([*other, *again]).splitlines()[-12:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[3] for row in rows] == ["4"] * 6 + ["10"] * 6  # fewer images first
    assert [row[8].rpartition(" ")[2] for row in rows[5:7]] == ["(cpu)", "(cuda)"]  # where the clock ran


def test_missing_weights_are_named(weights, tmp_path):
    with pytest.raises(MCBNError, match=r"no .*none.npz; save the weights of github.com/akamaster"):
        foreign.cifar(tmp_path / "none.npz", tmp_path)
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    with pytest.raises(MCBNError, match=r"other.npz holds no ResNet for CIFAR-10"):
        foreign.cifar(tmp_path / "other.npz", tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "posteriors", "--cifar", "--weights", "none.npz"])
    assert result.exit_code == 2
    assert "there is no none.npz" in result.output
