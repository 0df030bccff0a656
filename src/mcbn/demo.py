"""`mcbn demo`: the paper's network on real data, scored against constant uncertainty, two of its figures, a report.

Protocol of Teye et al. 2018, section 4.3, with a small grid searched beforehand: per split, tau comes from a network on
a validation fold; the scored network is trained on the whole training part; test rows serve for scores alone. The 95 %
intervals are calibrated by the errors of that fold's network: of the scored one no rows are left to hold out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mcbn import data, plots
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn.noise import constant_tau
from mcbn.page import write_page
from mcbn.page.evidence import Spread, spread
from mcbn.page.scores import regression_scores
from mcbn.prediction import RegressionPrediction
from mcbn.progress import Tick, bar

T = 500  # section 4.3


@dataclass(frozen=True)
class Setting:
    """Hyperparameters of a data set."""

    batch_size: int
    weight_decay: float
    epochs: int


# Best mean RMSE of the MCBN mean on the first validation fold of splits 1 and 2 (no test rows), out of batch size
# 32, 64; weight decay 1e-1, 1e-2, 1e-3, 1e-5; 50, 100, ... 500 epochs.
SETTINGS = {"boston": Setting(32, 1e-1, 400), "concrete": Setting(32, 1e-5, 400)}
TOY = Setting(batch_size=20, weight_decay=1e-5, epochs=1500)


class ScoredSplit(NamedTuple):
    """The network of one split, what it predicts on the test part, and the columns of the table."""

    bayes: MCBN[RegressionPrediction]
    test: Spread
    columns: dict[str, float]


def run(out: Path, *, splits: int = 5, epochs: int | None = None, seed: int = 0) -> None:
    """Train, fit, score, draw; print the table and where the report is."""
    if splits < 1 or (epochs is not None and epochs < 1):
        raise MCBNError(f"the demonstration needs a split and an epoch at least; got {splits} splits, {epochs} epochs")
    torch.set_num_threads(1)  # the network is small: a second thread only waits
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: replace(s, epochs=epochs or s.epochs) for name, s in SETTINGS.items()}
    toy = replace(TOY, epochs=epochs or TOY.epochs)
    total = sum(2 * splits * s.epochs for s in settings.values()) + toy.epochs
    with bar("training", total, "epoch") as tick:
        numbers = range(1, splits + 1)
        scored = {name: [score_split(name, n, s, tick, seed) for n in numbers] for name, s in settings.items()}
        figures, figure = [plot_errors(out, scored), out / "toy.png"], plots.new_figure(6.5, 4.2)
        plots.toy(**predict_toy(toy, tick, seed), ax=figure.subplots())  # type: ignore[arg-type]
        figure.savefig(figures[1])
    page = write_report(out, "boston", scored["boston"][0])
    print(table(scored))
    print(f"{time.perf_counter() - started:.0f} seconds; figures: {', '.join(map(str, figures))}")
    print(f"report of the first split of boston: {page.resolve()} (open it in a browser)")


def score_split(name: str, number: int, setting: Setting, tick: Tick, seed: int = 0) -> ScoredSplit:
    """Tune tau on a validation fold, retrain on the whole training part, score the test part of one split."""
    seed += number
    x, y = (values.float() for values in data.load(name))
    split = data.split(len(x), number)
    fold = data.folds(split.train)[0]
    x_val, y_val = x[fold.validation], y[fold.validation]
    tuned = train_and_fit(x[fold.train], y[fold.train], setting, seed, tick).tune((x_val, y_val))
    constant = float(constant_tau(tuned.predict(x_val).mean, y_val))
    final = train_and_fit(x[split.train], y[split.train], setting, seed, tick)
    final.tau = tuned.tau
    final.calibration = tuned.calibrate((x_val, y_val)).calibration
    return score(final, x[split.test], y[split.test], constant)


def train_and_fit(
    x: Tensor, y: Tensor, setting: Setting, seed: int, tick: Tick, hidden: tuple[int, ...] = (50, 50)
) -> MCBN[RegressionPrediction]:
    """Train the paper's network in original units, then draw its T sets of batch statistics."""
    network = Standardized(RegressionMLP(x.shape[1], hidden, seed=seed), x, y)

    def count(epoch: int) -> None:
        tick(1)

    train_regression(network, x, y, **asdict(setting), seed=seed, on_epoch=count)
    return MCBN(network, "regression").fit(x, n_samples=T, batch_size=setting.batch_size)


def score(bayes: MCBN[RegressionPrediction], x: Tensor, y: Tensor, constant: float) -> ScoredSplit:
    """Score MCBN and its twin of constant precision on test data."""
    test = spread(bayes, x, y, constant_std=constant**-0.5)
    rows = {row.name: row for row in regression_scores(test)}
    columns = {"RMSE": rows["RMSE"].ours, "share inside 95 %": 100 * float(test.inside.mean())}
    for name in ("CRPS", "PLL"):
        ours, twin, _, normalized = rows[name][2:]
        columns |= {name: ours, f"{name} constant": twin, f"{name} normalised %": normalized}
    return ScoredSplit(bayes, test, columns)


def table(scored: Mapping[str, Sequence[ScoredSplit]]) -> str:
    """Lay out mean and standard error over the splits; normalised: 0 is constant uncertainty, 100 the optimum."""
    first = next(iter(scored.values()))
    titles = [name.split(" ", 1)[-1] for name in first[0].columns]
    lines = ["MCBN against constant uncertainty (lower RMSE and CRPS, higher PLL and normalised scores are better)"]
    lines.append(f"{'':10}" + "".join(f"{title:>16}" for title in titles))
    for name, splits in scored.items():
        columns = torch.tensor([[*split.columns.values()] for split in splits])  # (splits, columns)
        errors = (columns.std(0) / len(splits) ** 0.5).tolist() if len(splits) > 1 else []
        means = [f"{mean:.2f}" for mean in columns.mean(0).tolist()]
        cells = [f"{m} +- {e:.2f}" for m, e in zip(means, errors, strict=True)] if errors else means
        lines.append(f"{name:10}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join([*lines, f"mean +- standard error over {len(first)} split(s), T = {T}, target units"])


def plot_errors(folder: Path, scored: Mapping[str, Sequence[ScoredSplit]]) -> Path:
    """Write the uncertainty-error plot of each data set's first split (paper Figure 2, left)."""
    figure = plots.new_figure(11, 4.2)
    for ax, (name, splits) in zip(figure.subplots(1, len(scored)), scored.items(), strict=True):
        test = splits[0].test
        plots.uncertainty_error(test.mean, test.std, test.y, constant_std=test.constant_std, ax=ax)
        ax.set_title(f"{data.describe(name).title}, test part of split 1", pad=34)
    figure.savefig(folder / "uncertainty_error.png")
    return folder / "uncertainty_error.png"


def write_report(folder: Path, name: str, scored: ScoredSplit) -> Path:
    """Write the report of a data set's first split: one HTML file."""
    x, y = (values.float() for values in data.load(name))
    split, about, constant = data.split(len(x), 1), data.describe(name), scored.test.constant_std
    title = f"{about.title}, {about.target}: how far can this network be trusted?"
    held_out = x[split.test], y[split.test]
    path = folder / "report.html"
    return write_page(path, scored.bayes, *held_out, train=x[split.train], constant_std=constant, title=title)


def predict_toy(
    setting: Setting, tick: Tick, seed: int = 0, held_out: data.Regression | None = None
) -> dict[str, Tensor | float]:
    """Fit three hidden layers of 30 units to one-dimensional data, and return what `plots.toy` draws (Figure 1).

    tau and the constant one are tuned on `held_out`, or on the points themselves.
    """
    x, y = (values.float() for values in data.toy())
    x_val, y_val = (values.float() for values in held_out or (x, y))
    bayes = train_and_fit(x, y, setting, seed, tick, hidden=(30, 30, 30)).tune((x_val, y_val))
    constant = float(constant_tau(bayes.predict(x_val).mean, y_val))
    grid = torch.linspace(-7, 7, 400)[:, None]  # (G, 1): two beyond both ends of the data
    pred = bayes.predict(grid)
    vectors = {"x_train": x[:, 0], "y_train": y, "x_grid": grid[:, 0], "mean": pred.mean, "std": pred.std}
    return {**vectors, "constant_std": constant**-0.5}
