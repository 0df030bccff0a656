"""The part of a report that shows single inputs, as the task and the kind of input ask for."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mcbn.model import MCBN
from mcbn.page import examples
from mcbn.page.evidence import Spread, Votes
from mcbn.page.html import Markup, element, number
from mcbn.page.wording import Wording

Few: TypeAlias = NDArray[np.int64]


def regression_examples(found: Spread, x: Any, words: Wording) -> list[Markup]:
    """Show the inputs with the widest and the narrowest predictive distributions."""
    parts = [element("h2", "The least and the most certain inputs")]
    chosen = examples.ends(found.std, found.inputs)
    for heading, few in zip(("Least certain", "Most certain"), chosen, strict=True):
        at = [np.flatnonzero(found.inputs == i) for i in few]
        values = [[float(v[p].mean()) for p in at] for v in (found.mean, found.std, found.y, found.error)]
        columns = dict(zip(("mean", "std", "target", "|error|"), values, strict=True))
        parts.append(element("h3", heading))
        if examples.is_image(x):
            captions = [
                f"input {i}: {_short(m)} ± {_short(s)}, target {_short(t)}"
                for i, m, s, t, _ in zip(few, *values, strict=True)
            ]
            parts.append(examples.pictures(x, few.tolist(), captions))
        else:
            parts.append(examples.rows(x, few.tolist(), columns, words.names))
    return parts


def _short(value: float) -> str:
    return number(value, 3)


def class_examples(
    bayes: MCBN[Any] | None, found: Votes, x: Any, y: Tensor, ignore_index: int | None, words: Wording
) -> list[Markup]:
    """Show the inputs with the highest and the lowest entropy; maps beside them for a segmentation."""
    parts = [element("h2", "The least and the most certain inputs")]
    mapped = bayes if y.ndim > 1 and len(found.inputs) > len(y) and examples.is_image(x) else None
    parts += [_key(mapped, found, x, ignore_index, words)] if mapped else []
    for heading, few in zip(("Least certain", "Most certain"), examples.ends(found.entropy, found.inputs), strict=True):
        parts.append(element("h3", heading))
        if mapped:
            maps = _maps(mapped, x, y, few.tolist(), ignore_index)
            parts.append(examples.pictures(x, few.tolist(), _map_captions(found, few), maps))
        else:
            parts.append(_answers(found, x, few, words))
    return parts


def _key(bayes: MCBN[Any], found: Votes, x: Tensor, ignore_index: int | None, words: Wording) -> Markup:
    """Name the colors of the classes that occur."""
    present = np.union1d(found.truth, found.label).tolist()
    names = {number: words.label(number) for number in present} | ({} if ignore_index is None else {-1: "left out"})
    return examples.color_key(names, float(np.log(bayes.plain(x[:1]).shape[1])))


def _map_captions(found: Votes, few: Few) -> list[str]:
    at = [np.flatnonzero(found.inputs == i) for i in few]
    return [
        f"input {i}: mean entropy {_short(found.entropy[p].mean())}, {found.error[p].mean():.1%} of pixels wrong"
        for i, p in zip(few, at, strict=True)
    ]


def _answers(found: Votes, x: Any, few: Few, words: Wording) -> Markup:
    """Show answer, truth, confidence and entropy of inputs that have one class each."""
    at = [int(np.flatnonzero(found.inputs == i)[0]) for i in few]
    said, truth = ([words.label(int(v[p])) for p in at] for v in (found.label, found.truth))
    confidence, entropy = ([float(v[p]) for p in at] for v in (found.confidence, found.entropy))
    if not examples.is_image(x):
        columns: dict[str, list[str] | list[float]] = {"answer": said, "truth": truth}
        columns |= {"confidence": confidence, "entropy": entropy}
        return examples.rows(x, few.tolist(), columns, words.names)
    captions = [
        f"input {i}: {a} ({c:.0%}), {'right' if a == b else f'in truth {b}'}, entropy {_short(e)}"
        for i, a, b, c, e in zip(few, said, truth, confidence, entropy, strict=True)
    ]
    return examples.pictures(x, few.tolist(), captions)


def _maps(bayes: MCBN[Any], x: Tensor, y: Tensor, few: Sequence[int], ignore_index: int | None) -> list[dict[str, Any]]:
    """Truth, prediction and uncertainty of segmented inputs as pictures."""
    pred = bayes.predict(x[list(few)])
    top = float(np.log(pred.probs.shape[1]))  # the entropy of knowing nothing
    truth = y[list(few)].clone()
    truth[truth == (-1 if ignore_index is None else ignore_index)] = -1
    return [
        {
            "truth": examples.label_colors(truth[k].reshape(pred.label[k].shape).cpu().numpy()),
            "answer": examples.label_colors(pred.label[k].cpu().numpy()),
            "entropy": examples.heat(pred.entropy[k].double().cpu().numpy(), top),
        }
        for k in range(len(few))
    ]
