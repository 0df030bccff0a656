"""The report of a regression: what it says, what it escapes, what it refuses."""

import base64
import hashlib
import re
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch

import mcbn
from kinds import make
from mcbn import metrics, networks
from mcbn.page import evidence, scores, templates, write_page, write_prediction_page
from pages import EVIL, Reader, assert_offline
from untouched import untouched


@pytest.fixture(scope="module")
def fitted():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x[:, 0] * 2 + (0.1 + x[:, 1].abs()) * torch.randn(400, generator=generator)
    network = networks.Standardized(networks.RegressionMLP(3, (20,), seed=0), x[:200], y[:200])
    networks.train_regression(network, x[:200], y[:200], epochs=20, seed=0)
    bayes = mcbn.MCBN(network, "regression").fit(x[:200], n_samples=50, batch_size=16).tune((x[200:300], y[200:300]))
    return bayes, x, y


def test_regression_page_holds_every_part_and_true_numbers(fitted, tmp_path: Path):
    bayes, x, y = fitted
    path = write_page(tmp_path / "new" / "page.html", bayes, x[300:], y[300:], train=x[:200])
    page = Reader(path.read_text())
    text = " ".join(page.words)
    pred = bayes.predict(x[300:])
    error = (pred.mean - y[300:]).abs()
    order = pred.std.argsort()
    ratio = (error[order[-10:]].mean() / error[order[:10]].mean()).item()
    said = re.search(r"Errors in the most uncertain tenth are .*?([\d.]+) times those in the least uncertain", text)
    assert float(said[1]) == pytest.approx(ratio, abs=0.05)
    assert set(page.blocks) == {"errors", "coverage", "reliability", "risk", "histogram"}
    chart = page.blocks["errors"]
    dots = next(series for series in chart["series"] if series["kind"] == "dots")
    assert dots["y"] == pytest.approx(error[order].tolist(), rel=1e-3)
    line = next(series for series in chart["series"] if series["name"] == "running mean of 10")
    naive = [error[order][max(0, i - 4) : i + 6].mean().item() for i in range(100)]
    assert line["y"] == pytest.approx(naive, rel=1e-3)
    band = chart["series"][0]
    assert band["y"] == pytest.approx((1.95996 * pred.std[order]).tolist(), rel=1e-3)
    assert templates.number(metrics.rmse(pred.mean, y[300:]).item()) in text
    aurc = metrics.aurc(pred.std.flatten(), error.flatten()).item()
    assert f"Area under the curve (AURC): {templates.number(aurc)}, in the best possible order " in text
    for heading in ("Least certain", "Most certain", "Checks of the draws", "Where the uncertainty comes from"):
        assert heading in text
    assert all(block["alt"] for block in page.blocks.values())


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (0.5, 2.05, "Errors in the most uncertain tenth are 4.1 times those in the least uncertain."),
        (2.0, 1.0, "Errors in the most uncertain tenth are no larger: only 0.50 times those in the least uncertain."),
        (0.0, 1.0, "The least uncertain tenth has no errors at all; those in the most uncertain are not 0."),
        (0.0, 0.0, "Neither the most nor the least uncertain tenth has any errors."),
    ],
)
def test_headline_compares_the_tenths(tmp_path: Path, low, high, sentence):
    # Twenty points whose two most certain err by `low`, two least certain by `high`, the others by 1.
    y = np.concatenate([[low] * 2, np.ones(16), [high] * 2])
    prediction = {"mean": np.zeros(20), "std": np.linspace(1, 2, 20)}
    path = write_prediction_page(tmp_path / "page.html", prediction, y, constant_std=1.0)
    words = [text.strip() for text in Reader(path.read_text()).words]
    assert sentence in words
    fact = f"Mean absolute error: {templates.number(low, 3)} in the most certain tenth"
    assert [text for text in words if text.startswith(fact)]


def test_constant_twin_is_as_given_or_tuned_on_the_data_shown(fitted):
    bayes, x, y = fitted
    tuned = evidence.spread(bayes, x[300:], y[300:])
    mean = bayes.predict(x[300:]).mean.double()
    stds = torch.linspace(0.5 * tuned.constant_std, 2 * tuned.constant_std, 301)
    losses = [metrics.crps_gaussian(mean, torch.full_like(mean, s**2), y[300:].double()).mean() for s in stds.tolist()]
    assert stds[int(torch.stack(losses).argmin())].item() == pytest.approx(tuned.constant_std, rel=0.01)
    assert "favours the twin" in tuned.constant_source
    given = evidence.spread(bayes, x[300:], y[300:], constant_std=2.0)
    assert (given.constant_std, given.constant_source) == (2.0, "as given")


def test_regression_scores_agree_with_the_metrics(fitted):
    bayes, x, y = fitted
    shown = evidence.spread(bayes, x[300:], y[300:], constant_std=1.3)
    rows = {row.name: row for row in scores.regression_scores(shown)}
    pred = bayes.predict(x[300:])
    mean, target = pred.mean.double(), y[300:].double()
    constant = metrics.crps_gaussian(mean, torch.full_like(mean, 1.69), target)
    crps = metrics.crps_gaussian(mean, pred.variance.double(), target)
    assert rows["CRPS"].ours == pytest.approx(crps.mean().item(), rel=1e-5)
    assert rows["CRPS"].twin == pytest.approx(constant.mean().item(), rel=1e-5)
    best = metrics.crps_optimum(mean, target)
    assert rows["CRPS"].normalized == pytest.approx(metrics.normalized(crps, constant, best).item(), rel=1e-3)
    assert rows["PLL"].ours == pytest.approx(pred.log_prob(y[300:]).mean().item(), rel=1e-5)
    plain = metrics.rmse(bayes.plain(x[300:]), y[300:]).item()
    assert rows["RMSE of the plain network"].ours == pytest.approx(plain, rel=1e-5)


def test_parts_give_the_same_as_the_whole(fitted, monkeypatch):
    bayes, x, y = fitted
    whole = evidence.spread(bayes, x[300:], y[300:])
    monkeypatch.setattr(evidence, "ROWS", 7)
    in_blocks = evidence.spread(bayes, x[300:], y[300:])
    assert in_blocks.std == pytest.approx(whole.std, rel=1e-5)
    assert in_blocks.log_prob == pytest.approx(whole.log_prob, rel=1e-4, abs=1e-5)


def test_nothing_of_the_user_becomes_markup(fitted, tmp_path: Path):
    bayes, x, y = fitted
    write_page(
        tmp_path / "page.html", bayes, x[300:], y[300:], names=["a", EVIL, '"><img src=x>'], title=EVIL, units=EVIL
    )
    text = (tmp_path / "page.html").read_text()
    page = Reader(text)
    assert EVIL not in text
    assert EVIL in page.words  # shown as it is
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [attributes for attributes in scripts if attributes.get("type") != "application/json"] == [{}]
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert EVIL in page.blocks["errors"]["y"]["label"]


def test_ten_thousand_points_stay_below_five_megabytes(fitted, tmp_path: Path):
    bayes, _, _ = fitted
    x = torch.randn(10_000, 3, generator=torch.Generator().manual_seed(3))
    path = write_page(tmp_path / "page.html", bayes, x, x[:, 0])
    assert path.stat().st_size < 5e6
    assert len(Reader(path.read_text()).blocks["errors"]["titles"]) == 10_000


def test_more_points_are_thinned_for_the_chart_and_counted_for_the_scores(fitted, tmp_path: Path, monkeypatch):
    bayes, x, y = fitted
    monkeypatch.setattr(scores, "MOST_POINTS", 40)
    page = Reader(write_page(tmp_path / "page.html", bayes, x[300:], y[300:]).read_text())
    assert len(page.blocks["errors"]["titles"]) == 40
    assert "Drawn are 40 of the 100 points" in " ".join(page.words)


def test_untuned_network_is_reported_without_likelihood(fitted, tmp_path: Path):
    tuned, x, y = fitted
    bayes = mcbn.MCBN(tuned.model, "regression").fit(x[:200], n_samples=20, batch_size=16)
    text = write_page(tmp_path / "page.html", bayes, x[300:], y[300:]).read_text()
    assert "The noise was never tuned" in text
    assert "PLL" not in text


def test_check_counts_what_it_compared(fitted):
    bayes, x, _ = fitted
    assert bayes.check(x[:200]).n_compared == 200
    few = bayes.check(x[:200], n_examples=40)
    assert few.n_compared == 48  # three batches of 16
    assert few.n_examples == 200
    assert few.n_effective == bayes.check(x[:200]).n_effective
    with pytest.raises(mcbn.MCBNError, match="n_examples must be a whole number"):
        bayes.check(x, n_examples=0)


def test_the_network_and_the_random_state_stay_as_they_were(fitted, tmp_path: Path):
    bayes, x, y = fitted
    tau = bayes.tau
    with untouched(bayes.model):
        write_page(tmp_path / "page.html", bayes, x[300:], y[300:], train=x[:200])
    assert bayes.tau == tau


def test_page_has_no_address_but_its_own_data(fitted, tmp_path: Path):
    bayes, x, y = fitted
    assert_offline(write_page(tmp_path / "page.html", bayes, x[300:], y[300:], train=x[:200]).read_text())


def test_constant_of_predictions_made_elsewhere_must_be_positive(tmp_path: Path):
    prediction = {"mean": np.zeros(3), "std": np.ones(3)}
    with pytest.raises(mcbn.MCBNError, match="constant_std must be positive, got 0"):
        write_prediction_page(tmp_path / "page.html", prediction, np.ones(3), constant_std=0)


def test_several_outputs_are_refused(tmp_path: Path):
    network, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=4, batch_size=8)
    outputs = bayes.plain(x)
    assert outputs.shape[1] > 1
    with pytest.raises(mcbn.MCBNError, match=f"{outputs.shape[1]} outputs"):
        write_page(tmp_path / "page.html", bayes, x, outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["a", "b"]}, "names holds 2 names, but x has 3 columns"),
        ({"constant_std": -1.0}, "constant_std must be positive"),
    ],
)
def test_wrong_options_leave_no_file(fitted, tmp_path: Path, options, message):
    bayes, x, y = fitted
    with pytest.raises(mcbn.MCBNError, match=message):
        write_page(tmp_path / "page.html", bayes, x[300:], y[300:], **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [(slice(0, 0), "held-out data is empty"), (slice(0, 5), "x has 100 rows but y 5")],
)
def test_targets_that_do_not_fit_are_refused(fitted, tmp_path: Path, rows, message):
    bayes, x, y = fitted
    with pytest.raises(mcbn.MCBNError, match=message):
        write_page(tmp_path / "page.html", bayes, x[300:], y[300:][rows])


def test_targets_that_are_not_numbers_are_refused(fitted, tmp_path: Path):
    bayes, x, y = fitted
    with pytest.raises(mcbn.MCBNError, match="NaN or infinity"):
        write_page(tmp_path / "page.html", bayes, x[300:], torch.full_like(y[300:], torch.nan))


def test_unwritable_path_leaves_nothing(fitted, tmp_path: Path):
    bayes, x, y = fitted
    (tmp_path / "file").write_text("here")
    with pytest.raises(mcbn.MCBNError, match=r"cannot write .*page\.html"):
        write_page(tmp_path / "file" / "page.html", bayes, x[300:], y[300:])


def test_text_is_escaped_in_cells_attributes_and_data():
    blocks = templates.environment().get_template("blocks.html.j2").module
    assert "<td>&lt;b&gt;</td>" in blocks.table(["<i>"], [["<b>"]])
    assert "&lt;i&gt;</button>" in blocks.table(["<i>"], [["<b>"]])
    figure = blocks.figure('"><b>', "<i>", {"a": "</script>", "b": [float("nan"), 1.5]}, "&")
    assert figure.count("</script") == 1
    page = Reader(figure)
    assert page.blocks == {'"><b>': {"a": "</script>", "b": [None, 1.5]}}
    assert "".join(page.words).strip() == "<i>&"


def test_the_policy_names_every_script_by_its_hash():
    page = templates.render("base.html.j2", title="t", lead="")
    policy = next(attributes["content"] for _, attributes in Reader(page).tags if "http-equiv" in attributes)
    scripts = re.findall("(?s)<script>(.*?)</script>", page)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 1
    assert policy.endswith(f"connect-src 'none'; script-src 'sha256-{hashes[0]}'")


def test_a_template_that_lacks_its_content_is_refused():
    with pytest.raises(jinja2.UndefinedError, match="'title' is undefined"):
        templates.render("base.html.j2", lead="")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (1234.5678, "1,235"), (0.012345, "0.01235"), (2e-7, "2.00e-07")]
)
def test_numbers_keep_four_digits(value, shown):
    assert templates.number(value) == shown


@pytest.mark.parametrize(("width", "word"), [(0.5, "too narrow"), (1.0, ""), (3.0, "too wide")])
def test_the_headline_says_what_is_wrong_with_the_intervals(width: float, word: str, tmp_path: Path) -> None:
    y = torch.randn(400, generator=torch.Generator().manual_seed(0)).numpy()
    predicted = {"mean": np.zeros(400), "std": np.full(400, width)}
    text = write_prediction_page(tmp_path / "page.html", predicted, y).read_text()
    headline = re.search(r'(?s)class="headline">(.*?)</p>', text)
    assert headline
    assert ("The intervals are" in headline[1]) is bool(word)
    assert word in headline[1]
    assert "write_page" not in text


def test_page_counts_calibrated_intervals_by_group(fitted, tmp_path: Path):
    bayes, x, y = fitted
    calibrated = bayes.with_posterior(bayes.posterior).calibrate((x[200:300], y[200:300]))
    groups = ["left" if value < 0 else "right" for value in x[300:, 0].tolist()]
    page = write_page(tmp_path / "page.html", calibrated, x[300:], y[300:], groups=groups).read_text()
    low, high = calibrated.predict(x[300:]).interval(0.95)
    target = y[300:].reshape(low.shape)
    inside = ((low <= target) & (target <= high)).double().flatten()
    spread = evidence.spread(calibrated, x[300:], y[300:])
    assert spread.inside.tolist() == inside.tolist()
    assert "most uncertain fifth by uncertainty" in page
    assert "Share inside the calibrated 95 % interval" in page
    assert "The bands and curves below are those before calibration" in page
    assert re.search(r">left</td>\s*<td[^>]*>\d+</td>", page)  # points are whole numbers
    with pytest.raises(mcbn.MCBNError, match="groups holds 1 names for"):
        write_page(tmp_path / "page.html", bayes, x[300:], y[300:], groups=["a"])


@pytest.mark.parametrize("options", [{"method": "linear"}, {"groups": [0, 1] * 50}])
def test_page_shows_gaussian_intervals_where_nothing_is_promised_of_them(fitted, tmp_path: Path, options):
    bayes, x, y = fitted
    calibrated = bayes.with_posterior(bayes.posterior).calibrate((x[200:300], y[200:300]), **options)
    page = write_page(tmp_path / "page.html", calibrated, x[300:], y[300:]).read_text()
    assert "Share inside the Gaussian 95 % interval" in page
    assert "before calibration" not in page
