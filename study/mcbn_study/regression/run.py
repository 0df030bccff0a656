"""The paper's regression study (Teye et al. 2018, Section 4.3; Table 1 and appendix): search, tau, test, records.

Cells of work: one per data set, family and batch size of the cross-validation, one per data set and method of the
test. Finished ones are never repeated; an interruption loses the one at work.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcbn.data import NAMES, Regression, load
from mcbn.errors import MCBNError
from mcbn_study.journal import CellJournal, Record
from mcbn_study.progress import Progress
from mcbn_study.regression import mnf
from mcbn_study.regression.context import Context
from mcbn_study.regression.ensemble import score_ensemble
from mcbn_study.regression.profile import METHODS, Profile
from mcbn_study.regression.search import cells, search_weight
from mcbn_study.regression.testing import TESTED, save_predictions, score_networks

STUDY = "regression"


def run(
    profile: Profile,
    out: str | Path = "results/regression",
    *,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    device: str = "cpu",
    compiled: bool = False,
    fused: bool = False,
) -> CellJournal:
    """Run the study for the given data sets (all of the profile's by default) and methods.

    `compiled` fuses elementwise work by torch.compile, `fused` many training steps into one CUDA kernel: for a GPU.
    """
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, methods, device)
    sets = {name: load(name) for name in datasets}
    context = Context(STUDY, profile, CellJournal(Path(out), profile.settings()), device, compiled, fused)
    work = [(name, method) for name in datasets for method in methods]
    context.progress = Progress(sum(_weight(context, *pair) for pair in work), STUDY)
    try:
        for name, method in work:
            score_method(context, name, sets[name], method)
    finally:
        context.progress.close()
    return context.store


def check_request(datasets: Sequence[str], methods: Sequence[str], device: str) -> None:
    """Refuse unknown names and a GPU that is not there."""
    for kind, given, known in (("data set", datasets, NAMES), ("method", methods, METHODS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise MCBNError(f"there is no {kind} {unknown[0]!r}; choose from {', '.join(known)}")
    if device not in ("cpu", "cuda"):
        raise MCBNError(f"device must be cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MCBNError("--device cuda asked, but torch sees no GPU; run with --device cpu")


def score_method(context: Context, dataset: str, data: Regression, method: str) -> None:
    """Test one method on every split and seed, unless its records are there."""
    done = is_done(context.store, context.profile, dataset, method)
    if done or context.store.load(f"{dataset}-test-{method}") is not None:
        context.progress.start("", _weight(context, dataset, method))
        context.progress.end()
    elif method == "mnf":
        _score_mnf(context, dataset)
    elif method == "ensemble":
        score_ensemble(context, dataset, data)
    else:
        score_networks(context, dataset, data, method)


def expected(profile: Profile, dataset: str, method: str) -> list[Record]:
    """List the records a method gives on a data set, by what tells them apart."""
    seeds = profile.seeds[:1] if method == "ensemble" else profile.seeds
    base = {"kind": "test", "dataset": dataset, "method": method}
    return [base | {"split": s, "seed": seed} for s in profile.splits for seed in seeds]


def is_done(journal: CellJournal, profile: Profile, dataset: str, method: str) -> bool:
    """Tell whether all of them are on record."""
    return all(journal.has(**record) for record in expected(profile, dataset, method))


def _score_mnf(context: Context, dataset: str) -> None:
    """Have the MNF baseline yield its runs; each split is written once all its seeds are there."""
    profile = context.profile
    wanted = expected(profile, dataset, "mnf")
    missing = sorted({r["split"] for r in wanted if not context.store.has(**r)})
    runs: dict[int, list[tuple[Record, Any]]] = {}
    for record in mnf.run(dataset, missing, profile.seeds, profile, context.device):
        predictions = record.pop("_predictions")
        own = runs.setdefault(record["split"], [])
        own.append((record, predictions))
        if len(own) == len(profile.seeds):
            _finish_mnf(context, dataset, record["split"], own)


def _finish_mnf(context: Context, dataset: str, s: int, runs: list[tuple[Record, Any]]) -> None:
    runs = sorted(runs, key=lambda run: int(run[0]["seed"]))
    error, std = (torch.stack([torch.as_tensor(run[1][i]) for run in runs]) for i in (0, 1))
    save_predictions(context, dataset, "mnf", s, error, std, [float(run[1][2]) for run in runs])
    context.store.append(run[0] for run in runs)


def _weight(context: Context, dataset: str, method: str) -> float:
    """Estimate the work of a method by its search, though methods of one family share theirs."""
    if method == "mnf":
        return 0.0
    family = TESTED[method][0] if method in TESTED else "bn"
    found = cells(context.profile, dataset, family)
    return sum(search_weight(context.profile, dataset, cell) for cell in found)
