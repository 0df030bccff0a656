"""A network leaves home: trained on monocrystalline solar cells, deployed on polycrystalline ones.

    pip install elpv-dataset            # 2,624 inspection photographs, CC BY-NC-SA 4.0 (Deitsch et al. 2019)
    python examples/solar_cells.py      # minutes on two cores

The alarm, the strange cells, the repair without labels, sets with guaranteed coverage, the cells to hand to a person.
Beside it a shift that a repair can undo: the cells of home, photographed with another exposure.
Adds to records.jsonl, writes stream.png and watch.html; the page shows photographs, so it stays with you.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from mcbn.page.field import write_watch_page

TRAIN, REFERENCE, DIM, POOL, LABELLED = 400, 400, 124, 256, 300  # cells: three times mono; poly without, with labels
M, FALSE_ALARMS, LEVEL, RISK = 6, 0.02, 0.9, 0.1  # 400 cells give enough batches of 6 for 2 %


class Cells(NamedTuple):
    """Photographs (N, 1, 60, 60) in [0, 1], and whether they show a defect (N,)."""

    x: Tensor
    y: Tensor

    def split(self, *sizes: int) -> list["Cells"]:
        """Cut into parts of these sizes, and the rest."""
        return [Cells(x, y) for x, y in zip(*[t.split([*sizes, len(t) - sum(sizes)]) for t in self], strict=True)]


def load_cells(seed: int) -> list[Cells]:
    """Return monocrystalline and polycrystalline cells, each in a random order."""
    try:
        from elpv_dataset.utils import load_dataset
    except ImportError as error:
        raise SystemExit("this example needs the photographs: pip install elpv-dataset") from error
    images, probability, kind = load_dataset()
    x = F.avg_pool2d(torch.from_numpy(images)[:, None].float() / 255, 5)
    y = torch.from_numpy(probability.copy() > 0.5).long()  # of a defect, as experts graded it: 0, 1/3, 2/3, 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    rows = [order[torch.from_numpy(kind == name)[order]] for name in ("mono", "poly")]
    return [Cells(x[i], y[i]) for i in rows]


def turned(cells: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put cells together, each mirrored at random: the augmentation of training."""
    x = [x.flip([axis for axis in (1, 2) if torch.rand(()) < 0.5]) for x, _ in cells]
    return torch.stack(x), torch.stack([y for _, y in cells])


def dimmed(cells: Cells) -> Cells:
    """Photograph cells with another exposure."""
    return Cells(0.4 * cells.x + 0.1, cells.y)


def train(loader: DataLoader[Any], epochs: int) -> nn.Module:
    """Train a small network from random weights."""
    layers: list[nn.Module] = []
    for a, b in ((1, 12), (12, 24), (24, 48), (48, 48)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
    for x, y in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def score(name: str, bayes: mcbn.MCBN[Any], cells: Cells) -> dict[str, Any]:
    """Score predictions, and where they are calibrated the sets and the cells to hand to a person."""
    pred = bayes.predict(cells.x)
    wrong = pred.label != cells.y
    row = {"accuracy": 1 - wrong.double().mean(), "nll": mcbn.metrics.nll(pred.probs, cells.y)}
    row["auroc"] = mcbn.metrics.auroc(pred.probs[:, 1], cells.y)
    if bayes.calibration is not None:
        held, asked = pred.set(LEVEL).gather(1, cells.y[:, None]), pred.reject(RISK)
        row |= {"in_set": held.double().mean(), "handed_over": asked.double().mean()}
        row |= {} if bool(asked.all()) else {"wrong_of_rest": wrong[~asked].double().mean()}
    return {"cells": name, **{key: round(float(value), 4) for key, value in row.items()}}


def draw(path: Path, rows: list[dict[str, Any]], n_home: int) -> None:
    """Plot p-values and evidence over time."""
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name in ("p_value", "evidence"):
        axes.semilogy(range(1, len(rows) + 1), [row[name] for row in rows], ".-", label=name.replace("_", "-"))
    axes.axhline(1 / FALSE_ALARMS, color="C3", ls="--", label="alarm")
    axes.axvline(n_home + 0.5, color="gray", ls=":", label="polycrystalline from here")
    axes.set_xlabel(f"batch of {M} cells")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(epochs: int = 30, samples: int = 24, seed: int = 0, out: Path = Path("solar_cells")) -> None:
    """Tell the story, with a network of so many epochs and T samples."""
    started, _ = time.perf_counter(), torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    mono, poly = load_cells(seed)
    learned, home, taken, tested = mono.split(TRAIN, REFERENCE, DIM)
    pool, labelled, away = poly.split(POOL, LABELLED)
    loader = DataLoader(TensorDataset(*learned), batch_size=25, shuffle=True, drop_last=True, collate_fn=turned)
    bayes = mcbn.MCBN(train(loader, epochs), "classification").fit(loader, n_samples=samples)

    watch = bayes.watch(home.x, batch_size=M, false_alarms=FALSE_ALARMS)
    n_home = len(taken.y) // M
    rows = list(watch.read([taken.x[: n_home * M], pool.x]))
    alarm = next((f"at batch {t}" for t, row in enumerate(rows, 1) if row["evidence"] >= 1 / FALSE_ALARMS), "none")
    strange = [float((watch.novelty(cells.x).p_value <= 0.05).double().mean()) for cells in (tested, away)]
    adapted = bayes.adapt(pool.x, reference=watch)
    write_watch_page(out / "watch.html", watch, pool.x, pool.y, rows=rows, bayes=bayes, adapted=adapted)
    draw(out / "stream.png", rows, n_home)

    at_home = bayes.with_posterior(bayes.posterior).calibrate((home.x, home.y))
    scores = [
        score("mono, calibrated on mono", at_home, tested),
        score("mono, another exposure", at_home, dimmed(tested)),
        score("the same, adapted", bayes.adapt(dimmed(taken).x, reference=watch), dimmed(tested)),
        score("poly, calibrated on mono", at_home, away),
        score("poly, adapted", adapted, away),
        score("poly, adapted, calibrated on poly", adapted.calibrate((labelled.x, labelled.y)), away),
    ]
    shifted = [sum(row["kind"] == "inputs" for row in part) for part in (rows[:n_home], rows[n_home:])]
    said = f"""Alarm: {alarm}; polycrystalline from batch {n_home + 1} on.
Batches called shifted: {shifted[0]} of {n_home} mono, {shifted[1]} of {len(rows) - n_home} poly.
Cells with p <= 0.05: {strange[0]:.0%} mono, {strange[1]:.0%} poly.
Repair: {adapted.adaptation.explain() if adapted.adaptation else ""}."""
    record = {"level": LEVEL, "torch": torch.__version__, "seconds": round(time.perf_counter() - started)}
    with (out / "records.jsonl").open("a") as file:
        file.write(json.dumps({"said": said.splitlines(), "scores": scores, **record}) + "\n")
    print(said, *scores, sep="\n")


if __name__ == "__main__":
    typer.run(main)
