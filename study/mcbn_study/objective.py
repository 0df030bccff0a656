"""Section 3.3: do variational inference and batch-norm training become one objective as N grows?

The paper's network is trained on the first N rows of Kin8nm's training part for the same number of steps; then the
gradients of Eq. (1) and Eq. (2) over those N rows are compared. Two cases: a fixed prior and no weight decay, where the
paper's limit says the gap goes to 0; weight decay and the prior it implies, which needs the appendix's assumptions
besides (no scale and shift, independent inputs, batch norm on every layer, large M), and this network breaks them.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

from mcbn import data
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study.journal import RECORDS, Journal, latest, read
from mcbn_study.progress import tracked
from mcbn_study.regularizer import UNIT_PRIOR
from mcbn_study.tables import write_tables
from mcbn_study.theory import objective_gap

SIZES = (100, 400, 1600, 6400)
STEPS = 200
SEEDS = (0, 1, 2)
M, DECAY, TAU = 32, 1e-2, 10.0


def run(out: str | Path, *, dataset: str = "kin8nm", sizes: Sequence[int] = SIZES, steps: int = STEPS) -> None:
    """Train on N rows, compare gradients, append a record for each N and seed, write the table."""
    x, y = data.load(dataset)
    train, rows = data.split(len(y), 1).train, []
    for n, seed in tracked(product(sizes, SEEDS), "objective", "network"):
        start, first = time.perf_counter(), (x[train[:n]], y[train[:n]])  # (n, Q), (n,)
        network = Standardized(RegressionMLP(x.shape[1], seed=seed).double(), *first)
        epochs = max(1, round(steps / (n // M)))
        train_regression(network, *first, batch_size=M, epochs=epochs, weight_decay=DECAY, seed=seed)
        inputs, targets = network.standardize(*first)
        compare = partial(objective_gap, network.network, inputs, targets[:, None], n=n, tau=TAU, batch_size=M)
        fixed, implied = compare(prior=UNIT_PRIOR)._asdict(), compare(weight_decay=DECAY)._asdict()
        row = {"dataset": dataset, "n": n, "seed": seed, "fixed": fixed, "implied": implied}
        rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
    Journal(out, {"steps": steps, "batch_size": M, "weight_decay": DECAY, "tau": TAU, "split": 1}).add(rows)
    report(Path(out))


def report(out: Path) -> None:
    """Write the gaps, averaged over seeds, from records alone."""
    records = latest(read(out / RECORDS), ("dataset", "n", "seed"))
    rows = []
    for n in sorted({r["n"] for r in records}):
        pairs = [(r["fixed"]["relative"], r["implied"]) for r in records if r["n"] == n]
        of_decay = [i["decay"] / (i["difference"] / i["relative"]) for _, i in pairs]
        against = [i["difference"] / i["decay"] for _, i in pairs]
        columns = [f for f, _ in pairs], [i["relative"] for _, i in pairs], of_decay, against
        rows.append((n, [fmean(values) for values in columns]))
    write_tables(out, __package__, "objective", rows=rows)
