"""The picture of the README: a stream of digits turns dark, the alarm rings, the repair brings the accuracy back."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "snippets"))
import mcbn
from trained import digits

SIZE, BEFORE, DARK, AFTER = 8, 20, 20, 20  # inputs a batch; batches of each stretch


def darken(images: Tensor) -> Tensor:
    """Lose contrast, as a lamp that ages."""
    return 0.3 * images + 0.1


def main() -> None:
    net, train_loader, (held_out, _), (images, labels) = digits()
    reference = torch.cat([train_loader.dataset.tensors[0], held_out])  # images as deployed, no augmentation
    bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=50)
    watch = bayes.watch(reference, batch_size=SIZE, false_alarms=0.01)
    rows = torch.randint(len(images), (BEFORE + DARK + AFTER, SIZE), generator=torch.Generator().manual_seed(1))
    adapted = bayes.adapt(darken(images[rows[BEFORE : BEFORE + DARK]].flatten(0, 1)), reference=reference)
    p_values, shares = [], []
    for i, batch in enumerate(rows):
        x, model = images[batch] if i < BEFORE else darken(images[batch]), adapted if i >= BEFORE + DARK else bayes
        p_values.append(watch(x).p_value)
        shares.append(float((model.predict(x).label == labels[batch]).float().mean()))
    draw(p_values, shares, Path(__file__).with_suffix(".png"))


def draw(p_values: list[float], shares: list[float], path: Path) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    time = range(1, len(shares) + 1)
    top.semilogy(time, p_values, "o", color="tab:purple")
    top.axhline(0.01, color="tab:red", linewidth=1)
    top.text(len(shares), 0.012, "alarm below 1 %", color="tab:red", ha="right", va="bottom")
    top.set_ylabel("p-value of the batch\n(no labels)")
    bottom.plot(time, shares, "o-", color="tab:blue")
    bottom.set(ylabel="accuracy", xlabel=f"batch of {SIZE} images", ylim=(-0.25, 1.05), yticks=(0, 0.5, 1))
    for axis in (top, bottom):
        axis.axvline(BEFORE + 0.5, color="gray", linestyle=":")
        axis.axvline(BEFORE + DARK + 0.5, color="gray", linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
    stretches = {0: "as in training", BEFORE: "the lamp ages", BEFORE + DARK: "bayes.adapt: repaired without labels"}
    for start, text in stretches.items():
        bottom.text(start + 0.8, -0.17, text, color="dimgray")
    figure.savefig(path, dpi=110)


main()
