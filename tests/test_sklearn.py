import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mcbn import MCBNError, data, metrics, stacked
from mcbn.conformal import cross_interval
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn.sklearn import MCBNClassifier, MCBNRegressor
from mcbn.sklearn.rows import Rows, distinct, folds, systematic
from mcbn.sklearn.training import Stack, population_output

QUICK = {"epochs": 15, "random_state": 0}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def line(n=120, q=3, d=None, noise=0.3, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(5, 2, (n, q))
    y = X @ generator.normal(size=(q, d or 1)) + noise * generator.normal(size=(n, d or 1))
    return X, y if d else y[:, 0]


def blobs(n=150, seed=0):
    X, y = make_blobs(n, centers=3, cluster_std=1.0, random_state=seed)
    return X, np.array(["ant", "bee", "cat"])[y]


# --- scikit-learn's own suite: every check, none skipped ---------------------------------------------------


@pytest.mark.slow
@parametrize_with_checks([MCBNRegressor(patience=20), MCBNClassifier(patience=20)])
def test_every_check_of_scikit_learn_passes(estimator, check, monkeypatch):
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # else the check of array inputs would skip itself
    check(estimator)


# --- rows --------------------------------------------------------------------------------------------------


def test_systematic_draws_whole_weights_exactly_and_others_within_one():
    weights = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    for offset in (0.0, 0.3, 0.999999):
        assert systematic(weights, 6, torch.tensor(offset, dtype=torch.float64)).tolist() == [0, 0, 1, 2, 2, 2]
    uneven = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01
    expected = 200 * uneven / uneven.sum()
    offsets = np.linspace(0, 1, 200, endpoint=False)
    counts = torch.stack([torch.bincount(systematic(uneven, 200, torch.tensor(o)), minlength=50) for o in offsets])
    assert ((counts - expected).abs() < 1 + 1e-9).all()
    np.testing.assert_allclose(counts.double().mean(0), expected, atol=0.02)  # unbiased over the offsets


def test_rows_are_the_same_for_weights_and_repetitions_in_any_order():
    X, y = line(30)
    weights = np.random.default_rng(0).integers(0, 4, 30).astype(float)
    again = np.random.default_rng(1).permutation(int(weights.sum()))
    times = weights.astype(int)
    repeated = distinct(X.repeat(times, 0)[again], y.repeat(times)[again], np.ones(len(again)))
    for a, b in zip(distinct(X, y, weights), repeated, strict=True):
        assert torch.equal(a, b)
    assert repeated.size == weights.sum()


def test_folds_partition_the_rows_and_spread_classes():
    X, _ = line(40)
    y = torch.tensor([0] * 30 + [1] * 10)
    rows = Rows(torch.from_numpy(X), y, torch.ones(40, dtype=torch.float64))
    pairs = folds(rows, 5, 0)
    assert torch.equal(torch.cat([held.x for _, held in pairs]).sort(0).values, rows.x.sort(0).values)
    assert all(int((held.y == 1).sum()) == 2 and len(training.x) == 32 for training, held in pairs)


# --- stacked training --------------------------------------------------------------------------------------


def fresh_stack(n_inputs, hidden, n_outputs=1, *, seeds, weight_decay=0.0, learning_rate=1e-3):
    values = stacked.initial_values(n_inputs, hidden, n_outputs, seeds=seeds)
    return Stack(values, weight_decay=weight_decay, learning_rate=learning_rate)


def test_stacked_steps_equal_training_one_network():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, 4, generator=generator), torch.randn(2, 16, 1, generator=generator)
    stack = fresh_stack(4, (6, 5), seeds=[1, 2], weight_decay=0.1)
    for _ in range(3):
        stack.step(x, y)
    for s, seed in enumerate((1, 2)):
        alone = RegressionMLP(4, (6, 5), seed=seed)
        train_regression(alone, x[s], y[s], batch_size=16, epochs=3, weight_decay=0.1)
        for name, value in stacked.network(stack.values, s, 4).named_parameters():
            torch.testing.assert_close(value, alone.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_population_output_equals_a_training_pass_over_all_rows():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    values = stacked.initial_values(4, (6, 5), 3, seeds=[1])
    expected = stacked.network(values, 0, 4).train()(x)
    torch.testing.assert_close(population_output(values, 0, x, torch.full((20,), 1 / 20), x), expected.detach())


def test_the_average_of_weights_is_that_of_its_recursion():
    stack = fresh_stack(2, (3,), seeds=[0], learning_rate=1e-1)
    expected = None
    for k in range(30):
        stack.step(torch.randn(1, 8, 2), torch.randn(1, 8, 1))
        stack.update_average(0.5)
        decay = min(0.5, k / (k + 10))
        value = stack.values["weights"]
        expected = value.clone() if expected is None else decay * expected + (1 - decay) * value
    torch.testing.assert_close(stack.average["weights"], expected)


def test_without_targets_inputs_alone_are_standardised():
    x = torch.from_numpy(line()[0])
    seen = Standardized(torch.nn.Identity(), x)(x)
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(seen.std(0, correction=0), 1)


# --- regression --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [None, 1, 2])
def test_predictions_are_shaped_as_the_targets(d):
    X, y = line(d=d)
    model = MCBNRegressor(**QUICK).fit(X, y)
    mean, std = model.predict(X[:7], return_std=True)
    assert mean.shape == std.shape == y[:7].shape
    np.testing.assert_array_equal(model.predict(X[:7]), mean)
    assert model.sample_y(X[:7], 5).shape == (*y[:7].shape, 5)
    assert np.ndim(model.bayes_.tau) == (1 if d == 2 else 0)


def test_std_interval_and_samples_agree_with_the_fitted_mcbn():
    X, y = line()
    model = MCBNRegressor(**QUICK).fit(X, y)
    pred = model.bayes_.predict(torch.from_numpy(X))
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, pred.mean)
    np.testing.assert_allclose(std**2, pred.epistemic.numpy() + 1 / model.bayes_.tau)
    low, high = model.predict_interval(X, coverage=0.5, calibrated=False)
    np.testing.assert_allclose(high - mean, 0.6744897501960817 * std, rtol=1e-6)
    np.testing.assert_allclose(mean - low, high - mean, rtol=1e-6)
    drawn = model.sample_y(X[:5], 20_000)
    error = std[:5] / np.sqrt(200)  # the functions are only T = 100, however often each is used
    assert (np.abs(drawn.mean(1) - mean[:5]) < 5 * error).all()
    np.testing.assert_allclose(drawn.std(1), std[:5], rtol=0.05)


def test_sampled_functions_follow_the_random_state_and_are_coherent():
    X, y = line()
    model = MCBNRegressor(**QUICK).fit(X, y)
    np.testing.assert_array_equal(model.sample_y(X, 3, random_state=1), model.sample_y(X, 3, random_state=1))
    assert not np.array_equal(model.sample_y(X, 3, random_state=1), model.sample_y(X, 3, random_state=2))
    model.bayes_.tau = 1e30  # no noise: what is left are draws of the network, each once
    functions = model.sample_y(X[:4], 100)
    expected = model.bayes_.sample(torch.from_numpy(X[:4])).numpy()  # (T, N)
    np.testing.assert_allclose(np.sort(functions[0]), np.sort(expected[:, 0]))
    order = np.argsort(functions[0])
    np.testing.assert_allclose(functions[:, order].T, expected[np.argsort(expected[:, 0])])


def test_intervals_cover_what_they_say():
    X, y = line(600, noise=1.0)
    model = MCBNRegressor(random_state=0, epochs=60).fit(X[:300], y[:300])
    low, high = model.predict_interval(X[300:], coverage=0.9)
    covered = ((low < y[300:]) & (y[300:] < high)).mean()
    assert abs(covered - 0.9) < 5 * np.sqrt(0.9 * 0.1 / 300)
    assert abs(model.bayes_.noise_std - 1.0) < 0.25
    assert model.score(X[300:], y[300:]) > 0.8


@pytest.mark.slow
def test_tau_is_tuned_on_rows_the_networks_have_not_seen():
    X, y = line(60, q=20, noise=3.0)  # far easier to memorise than to predict
    model = MCBNRegressor(random_state=0, epochs=150, early_stopping=False, weight_decay=0.0).fit(X, y)
    seen = np.sqrt(np.mean((model.predict(X) - y) ** 2))
    assert model.bayes_.noise_std > 2 * seen


def test_early_stopping_ends_before_the_last_epoch_and_can_be_turned_off():
    X, y = line(60, q=20, noise=3.0)
    assert MCBNRegressor(random_state=0, epochs=200, patience=20).fit(X, y).n_iter_ < 200
    assert MCBNRegressor(random_state=0, epochs=20, early_stopping=False).fit(X, y).n_iter_ == 20


@pytest.mark.parametrize(
    ("n", "asked", "expected"),
    [(599, None, 32), (600, None, 64), (600, 16, 16), (20, None, 8), (20_000, None, 256)],
)
def test_batch_size_follows_the_rows_unless_given(n, asked, expected):
    model = MCBNRegressor(random_state=0, epochs=1, n_samples=2, batch_size=asked).fit(*line(n))
    assert model.bayes_.posterior.batch_size == expected


def test_fractional_weights_pull_the_fit_towards_heavy_rows():
    X, _ = line(200)
    y = np.where(np.arange(200) % 2, 1.0, -1.0) * 10
    weights = np.where(y > 0, 2.5, 0.3)
    mean = MCBNRegressor(**QUICK).fit(X, y, sample_weight=weights).predict(X).mean()
    expected = np.average(y, weights=weights)
    assert abs(mean - expected) < 2
    scaled = MCBNRegressor(**QUICK).fit(X, y, sample_weight=weights * 8.1).predict(X).mean()
    assert abs(scaled - mean) < 1e-6  # relative to their mean


def test_global_generators_and_data_are_untouched():
    X, y = line()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), X.copy(), y.copy()
    MCBNRegressor(**QUICK).fit(X, y).predict(X)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    np.testing.assert_array_equal(before[2], X)
    np.testing.assert_array_equal(before[3], y)


def test_same_random_state_same_model_other_state_other_model():
    X, y = line()
    first, same, other = (MCBNRegressor(epochs=5, random_state=s).fit(X, y).predict(X) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.allclose(first, other)


# --- classification ----------------------------------------------------------------------------------------


def test_classifier_predicts_its_labels_with_averaged_probabilities():
    X, y = blobs()
    model = MCBNClassifier(random_state=0, epochs=60).fit(X, y)
    probs = model.predict_proba(X)
    assert list(model.classes_) == ["ant", "bee", "cat"]
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_allclose(probs, model.bayes_.predict(torch.from_numpy(X)).probs)
    assert (model.predict(X) == model.classes_[probs.argmax(1)]).all()
    assert model.score(X, y) > 0.8
    assert 0 < model.bayes_.tau <= 1


def test_temperature_of_random_labels_is_high():
    X, y = line(80, q=20)[0], np.random.default_rng(0).integers(0, 2, 80)
    model = MCBNClassifier(random_state=0, epochs=100, early_stopping=False).fit(X, y)
    assert model.bayes_.tau < 0.5


# --- the tools around it -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipeline_grid_search_and_cross_validation():
    X, y = line()
    assert len(cross_val_score(make_pipeline(StandardScaler(), MCBNRegressor(**QUICK)), X, y, cv=2)) == 2
    search = GridSearchCV(MCBNClassifier(**QUICK), {"hidden": [(8,), (8, 8)]}, cv=2).fit(*blobs())
    assert search.best_params_["hidden"] in [(8,), (8, 8)]


def test_clone_and_pickle():
    X, y = line(d=2)
    model = MCBNRegressor(**QUICK).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    for a, b in zip(model.predict(X, return_std=True), again.predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "bayes_")


def test_pandas_in_and_feature_names_kept():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, y = line()
    frame = pandas.DataFrame(X, columns=["age", "height", "mass"])
    model = MCBNRegressor(**QUICK).fit(frame, pandas.Series(y))
    assert list(model.feature_names_in_) == ["age", "height", "mass"]
    assert model.n_features_in_ == 3
    np.testing.assert_array_equal(model.predict(frame), MCBNRegressor(**QUICK).fit(X, y).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["mass", "age", "height"]])


# --- bad input ---------------------------------------------------------------------------------------------


def test_one_class_is_refused():
    X, _ = blobs()
    with pytest.raises(MCBNError, match="one class: 'ant'"):
        MCBNClassifier().fit(X, np.repeat("ant", len(X)))
    y, weights = np.repeat(["ant", "bee"], 75), np.repeat([1.0, 0.0], 75)
    with pytest.raises(MCBNError, match="one class"):
        MCBNClassifier().fit(X, y, sample_weight=weights)


@pytest.mark.parametrize("model", [MCBNRegressor(), MCBNClassifier()])
def test_nan_and_sparse_input_are_refused(model):
    sparse = pytest.importorskip("scipy.sparse")
    X, y = line()
    y = np.arange(120) % 2
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.append(X[1:], [[np.nan, 0, 0]], 0), y)
    with pytest.raises(TypeError, match="parse"):
        model.fit(sparse.csr_array(X), y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": (0,)}, "hidden takes whole numbers of at least 1; got 0"),
        ({"n_samples": 0}, "n_samples"),
        ({"batch_size": 1}, "batch_size takes whole numbers of at least 2"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"n_folds": 1}, "n_folds"),
        ({"patience": True}, "patience"),
        ({"weight_decay": -1.0}, "weight_decay takes numbers of at least 0; got -1.0"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
)
def test_bad_parameters_are_refused(options, message):
    with pytest.raises(MCBNError, match=message):
        MCBNRegressor(**options).fit(*line())


def test_bad_weights_coverage_and_counts_are_refused():
    X, y = line()
    with pytest.raises(ValueError, match="zero"):
        MCBNRegressor().fit(X, y, sample_weight=np.zeros(120))
    with pytest.raises(ValueError, match="egative"):
        MCBNRegressor().fit(X, y, sample_weight=np.full(120, -1.0))
    with pytest.raises(MCBNError, match="1 sample"):
        MCBNRegressor().fit(X, y, sample_weight=np.eye(120)[0])
    model = MCBNRegressor(**QUICK).fit(X, y)
    with pytest.raises(MCBNError, match="between 0 and 1"):
        model.predict_interval(X, coverage=95)
    with pytest.raises(MCBNError, match="n_samples"):
        model.sample_y(X, 0)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["sklearn", "torchmetrics", "lightning"])
def test_a_missing_extra_is_named(extra):
    code = (
        f"import sys; sys.modules[{extra!r}] = None\nimport mcbn\n"
        f"try:\n    import mcbn.{extra}\nexcept mcbn.MCBNError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert f"pip install 'mcbn[{extra}]'" in done.stdout


# --- the paper's data --------------------------------------------------------------------------------------

# The paper's own MCBN scores, RMSE and CRPS (Teye et al. 2018), and our std over its five splits.
BOUND = {"boston": (2.75, 1.45), "concrete": (4.78, 2.40)}
STD = {"boston": (0.27, 0.11), "concrete": (0.31, 0.13)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["boston", "concrete"])
def test_default_scores_on_the_papers_first_split(name):
    x, y = data.load(name)
    X, y = x.numpy(), y.numpy()
    split = data.split(len(X), 1)
    model = MCBNRegressor(random_state=1).fit(X[split.train], y[split.train])
    mean, std = model.predict(X[split.test], return_std=True)
    scores = metrics.rmse(mean, y[split.test]), metrics.crps_gaussian(mean, std**2, y[split.test]).mean()
    for score, bound, spread in zip(scores, BOUND[name], STD[name], strict=True):
        assert score < bound + 2 * spread


def noisy_line(n, seed):
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (n, 2))
    return X, X[:, 0] + (0.1 + np.abs(X[:, 1])) * generator.standard_normal(n)


def test_intervals_are_cv_plus_over_the_folds():
    X, y = noisy_line(60, 0)
    model = MCBNRegressor(epochs=20, n_samples=10, n_folds=3, random_state=0).fit(X, y)
    new = noisy_line(7, 1)[0]
    low, high = model.predict_interval(new, 0.8)
    lows, highs = [], []
    for bayes in model.folds_:
        pred = bayes.predict(torch.from_numpy(new))
        for score in bayes.calibration.scores[0][:, 0].tolist():
            lows.append((pred.mean - score * pred.std).numpy())
            highs.append((pred.mean + score * pred.std).numpy())
    assert len(lows) == 60
    np.testing.assert_allclose(low, np.sort(lows, 0)[math.floor(0.2 * 61) - 1])
    np.testing.assert_allclose(high, np.sort(highs, 0)[math.ceil(0.8 * 61) - 1])
    gaussian = model.predict_interval(new, 0.8, calibrated=False)
    assert not np.allclose(low, gaussian[0])
    with pytest.raises(MCBNError, match=r"level 0\.99 needs at least 99 held-out examples"):
        model.predict_interval(new, 0.99)


def test_calibrated_intervals_and_sets_hold_about_what_they_promise():
    X, y = noisy_line(200, 2)
    new, target = noisy_line(2000, 3)
    model = MCBNRegressor(epochs=40, n_samples=20, random_state=0).fit(X, y)
    low, high = model.predict_interval(new, 0.8)
    bound = 4 * (0.16 * (1 / 200 + 1 / 2000)) ** 0.5
    assert abs(((low <= target) & (target <= high)).mean() - 0.8) < bound
    classifier = MCBNClassifier(epochs=20, n_samples=20, random_state=0).fit(X, y > 0)
    sets = classifier.predict_set(new, 0.8)
    assert sets.shape == (2000, 2)
    assert sets[np.arange(2000), (target > 0).astype(int)].mean() > 0.8 - bound
    two = MCBNRegressor(epochs=5, n_samples=4, random_state=0).fit(X, np.column_stack([y, -y]))
    assert two.predict_interval(new, 0.8)[0].shape == (2000, 2)


def test_too_few_rows_for_folds_give_the_gaussian_interval():
    X, y = noisy_line(3, 0)
    model = MCBNRegressor(epochs=3, n_samples=4, random_state=0).fit(X, y)
    assert model.folds_ == []
    assert np.allclose(model.predict_interval(X, 0.9)[0], model.predict_interval(X, 0.9, calibrated=False)[0])


def test_intervals_and_sets_of_one_held_out_part_are_calibrated_on_it(monkeypatch):
    monkeypatch.setattr("mcbn.sklearn.training.ONE_PART", 100)
    X, y = noisy_line(400, 4)
    new, target = noisy_line(2000, 5)
    model = MCBNRegressor(epochs=20, n_samples=10, random_state=0).fit(X, y)
    (fold,) = model.folds_
    low, high = model.predict_interval(new, 0.8)
    np.testing.assert_array_equal(low, fold.predict(torch.from_numpy(new)).interval(0.8)[0])
    np.testing.assert_allclose(low, cross_interval([fold.predict(torch.from_numpy(new))], 0.8)[0])
    assert abs(((low <= target) & (target <= high)).mean() - 0.8) < 4 * (0.16 * (1 / 80 + 1 / 2000)) ** 0.5
    with pytest.raises(MCBNError, match=r"level 0\.99 needs at least 99 held-out examples"):
        model.predict_interval(new, 0.99)
    classifier = MCBNClassifier(epochs=20, n_samples=10, random_state=0).fit(X, y > 0)
    sets = classifier.folds_[0].predict(torch.from_numpy(new)).set(0.8)
    np.testing.assert_array_equal(classifier.predict_set(new, 0.8), sets)


def test_many_rows_hold_out_one_part(monkeypatch):
    held = []

    def stack(values, **options):
        held.append(len(values["weights"]))
        return Stack(values, **options)

    monkeypatch.setattr("mcbn.sklearn.training.Stack", stack)
    for n in (500, 20_000):
        MCBNRegressor(random_state=0, epochs=1, n_samples=2, hidden=4).fit(*line(n))
    assert held == [6, 2]  # networks, that of all rows among them


def test_a_fit_that_fails_keeps_network_and_classes_together():
    X = np.random.default_rng(0).normal(size=(40, 2))
    model = MCBNClassifier(epochs=2, n_samples=4, random_state=0).fit(X, X[:, 0] > 0)
    before = model.predict(X)
    with pytest.raises(MCBNError, match="epochs takes"):
        model.set_params(epochs=-1).fit(X, np.array(["x", "y", "z", "x"] * 10))
    assert model.predict(X).tolist() == before.tolist()
