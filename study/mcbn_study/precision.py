"""How far the scores of MCBN hang on tau: the networks of the regression study at multiples of the tau they chose."""

from pathlib import Path
from typing import Any

from mcbn import MCBN, data
from mcbn.files import write_text
from mcbn_study import paper
from mcbn_study.estimates import cell, mean_cell
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.regression.measure import score_run
from mcbn_study.regression.train import load_networks
from mcbn_study.tables import render

CONFIG: dict[str, Any] = {"n_samples": 500, "factors": [0.5, 1, 1.5, 2, 3, 4]}
METRICS = ("crps", "pll", "crps_normalized", "pll_normalized")


def run(out: str | Path, *, regression: str | Path = "results/regression") -> None:
    """Score the test rows of every network, a record a data set and factor; write the table."""
    journal = Journal(out, CONFIG)
    for path in sorted((Path(regression) / "networks").glob("*[!s].safetensors")):  # no networks of folds
        if not journal.has(dataset=path.stem):
            journal.add(_rows(path))
    report(Path(out))


def _rows(path: Path) -> list[Record]:
    rows: dict[float, Record] = {k: {"dataset": path.stem, "factor": k} for k in CONFIG["factors"]}
    (x, y), T = data.load(path.stem), CONFIG["n_samples"]
    for network, info in load_networks(path):
        test, chosen = (
            data.split(len(y), info["split"]).test,
            {"batch_size": info["config"]["batch_size"], "n_samples": T},
        )
        bayes = MCBN(network, "regression").fit(x[info["train"]].float(), seed=info["seed"], **chosen)
        samples = bayes.sample(x[test].float()).flatten(1)  # (T, n)
        for factor, row in rows.items():
            scores = score_run(samples, y[test], factor * info["tau"], info["tau_constant"])
            for metric in METRICS:
                row.setdefault(metric, []).append(scores[metric])
    return list(rows.values())


def report(out: Path) -> None:
    """Write the table of scores beside the paper's, from records alone."""
    records = latest(read(out / RECORDS), ("dataset", "factor"))
    content = {"records": records, "metrics": METRICS, "mean": mean_cell, "cell": cell, "find": paper.find}
    write_text(out / "table.md", render(__package__, "precision.md.j2", **content))
