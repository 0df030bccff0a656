"""What is measured of a network: false alarms, power, strange inputs, repairs. Every function yields rows."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcbn import data, metrics
from mcbn.field.distance import rank_p_values
from mcbn.field.watch import Martingale, Watch
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study.alternatives.run import ood_auroc, probabilities, temperature
from mcbn_study.data.cifar import Images
from mcbn_study.estimates import class_scores
from mcbn_study.journal import Record
from mcbn_study.machine import timed
from mcbn_study.shift.baselines import batch_tests, blended, input_scores, tent
from mcbn_study.shift.corruptions import corrupt
from mcbn_study.shift.profile import Inputs, ShiftProfile
from mcbn_study.shift.train import Subject, is_novel, known

ALPHA = 0.01
PSEUDO = 128  # N of Schneider et al. 2020: running statistics count as so many inputs; of 0 to 128 best on the extras
SENSOR_BATCH = 16
RATE_OF_PAIR = 0.1  # two classes are too few images for less


def cut(n: int, first: int, seed: int) -> tuple[Tensor, Tensor]:
    """Cut n rows at random in two."""
    order = torch.from_numpy(np.random.default_rng([seed, n]).permutation(n))
    return order[:first], order[first:]


def batch_rows(n: int, size: int, count: int, seed: int) -> Tensor:
    """Choose batches (count, size) out of n rows, none twice in a batch."""
    generator = np.random.default_rng([seed, size])
    return torch.from_numpy(np.stack([generator.choice(n, size, replace=False) for _ in range(count)]))


def p_values(watch: Watch, x: Tensor, rows: Tensor) -> Tensor:
    """Read batches (B, M) of rows of inputs, many in a pass: as `watch(x)` ranks each."""
    z = watch.all_coordinates(x[some.to(x.device)] for some in rows)
    null = watch.null(rows.shape[1])
    return rank_p_values(null.metric(z), null.held_out)


class Corrupted:
    """The test images that are no reference, corrupted in every way: the same for all networks and methods."""

    def __init__(self, inputs: Inputs, profile: ShiftProfile) -> None:
        self.inputs, self.kept = inputs, dict[tuple[str, int], Tensor]()
        reference, others = cut(len(inputs.test.x), profile.n_reference, 0)
        others = others[: profile.n_pool + profile.n_scored]
        self.home, self.home_y = (part[reference] for part in inputs.test)
        self.x, self.y = (part[others] for part in inputs.test)
        self.kinds = [kind for kind in profile.kinds if kind != "frost" or inputs.frost is not None]

    def at(self, severity: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the kinds and bytes (N, 3, 32, 32) of a severity; of 0 the images as they are."""
        for kind in self.kinds if severity else ["none"]:
            if severity and (kind, severity) not in self.kept:
                self.kept[kind, severity] = corrupt(self.x, kind, severity, frost=self.inputs.frost)
            yield kind, self.kept.get((kind, severity), self.x)


def alarms(subject: Subject, corrupted: Corrupted, profile: ShiftProfile) -> Iterator[Record]:
    """Count alarms of clean batches, and of clean inputs, over several references.

    Reference and clean images are both test images; at sizes for which these are too few, both training images without
    augmentation: what counts is that the network knows the one as well as the other.
    """
    bayes, inputs = subject.fit(profile), corrupted.inputs
    tried = profile.references * profile.clean_batches
    for size in profile.alarm_sizes:
        unseen = 1.4 * 99 * size < len(inputs.test.x) * 2 / 3
        images = inputs.test.x if unseen else inputs.train.x
        first = len(images) * 2 // 3 if unseen else len(images) * 6 // 7
        alarmed, facts = 0, dict[str, float]()
        for number in range(profile.references):
            reference, clean = (subject.prepare(images[rows]) for rows in cut(len(images), first, number))
            watch = bayes.watch(reference, batch_size=size, seed=number)
            rows = batch_rows(len(clean), size, profile.clean_batches, number)
            alarmed += int((p_values(watch, clean, rows) <= ALPHA).sum())
            facts = {"held_out": len(watch.null(size).held_out), **spread(watch, size)}
        yield {"what": f"M = {size}", "M": size, "alarms": alarmed, "n": tried, "unseen": unseen, **facts}
    yield from _input_alarms(bayes, subject, inputs.test.x)


def cost(subject: Subject, corrupted: Corrupted, profile: ShiftProfile) -> Iterator[Record]:
    """Time a reading beside a plain pass of the same batch, in turns; on a CPU, time of the processor."""
    images, sizes = corrupted.inputs.test.x, profile.power_sizes
    watch = subject.fit(profile).watch(subject.prepare(images[: profile.n_reference]), batch_size=sizes[0])

    def seconds(function: Callable[[Tensor], object], x: Tensor) -> float:
        started = time.process_time()
        _, elapsed = timed(function, x)
        return elapsed if x.is_cuda else time.process_time() - started

    for size in sizes:
        batches = [subject.prepare(images[rows]) for rows in batch_rows(len(images), size, profile.timed, 0)]
        with torch.no_grad():
            pairs = [(seconds(watch, x), seconds(subject.network, x)) for x in batches][1:]  # the first warms up
        reading, plain = (1000 * float(np.median(column)) for column in zip(*pairs, strict=True))
        yield {"M": size, "reading_milliseconds": reading, "pass_milliseconds": plain}


def spread(watch: Watch, size: int) -> dict[str, float]:
    """Median deviations of the statistics of batches, times sqrt(M): constant where they fall as 1 / sqrt(M)."""
    of_means = torch.cat([torch.arange(2 * C) < C for C in watch.channels.values()])
    scaled = watch.null(size).metric.scale * size**0.5
    return {"spread_mean": float(scaled[of_means].median()), "spread_log_var": float(scaled[~of_means].median())}


def _input_alarms(bayes: MCBN[Any], subject: Subject, images: Tensor) -> Iterator[Record]:
    """Judge every test image once, with half of the others as reference."""
    first, second = (subject.prepare(images[rows]) for rows in cut(len(images), len(images) // 2, 0))
    pairs = ((first, second), (second, first))
    judged = [bayes.watch(reference, batch_size=2).novelty(clean) for reference, clean in pairs]
    for what, field in (("inputs", "p_value"), ("inputs, with entropy", "combined")):
        alarmed = sum(int((getattr(novelty, field) <= ALPHA).sum()) for novelty in judged)
        yield {"what": what, "alarms": alarmed, "n": len(images), "unseen": True}


def streams(subject: Subject, corrupted: Corrupted, profile: ShiftProfile) -> Iterator[Record]:
    """Follow clean streams of real distances.

    All distances are of batches of test images; held out or in the stream is decided by a random order for each
    stream, so that they are exchangeable, as the bound asks for, whatever overlap there is.
    """
    (count, updates, size), images = profile.stream, corrupted.inputs.test.x
    reference, clean = cut(len(images), len(images) // 4, 0)
    watch = subject.fit(profile).watch(subject.prepare(images[reference]), batch_size=size)
    null = watch.null(size)
    R, x = len(null.held_out), subject.prepare(images[clean])
    rows = batch_rows(len(x), size, updates + R, 0)
    distances = null.metric(watch.all_coordinates(x[some.to(x.device)] for some in rows)).numpy()
    alarmed = 0
    for number in range(count):
        order = np.random.default_rng(number).permutation(distances)
        stream = Martingale(torch.from_numpy(order[:R]), number)
        for distance in order[R:]:
            stream.bet(stream.rank(float(distance)))
        alarmed += stream.highest >= -np.log(ALPHA)
    yield {"what": "streams", "alarms": int(alarmed), "n": count, "updates": updates, "M": size, "held_out": R}


def power(subject: Subject, corrupted: Corrupted, profile: ShiftProfile, severity: int) -> Iterator[Record]:
    """Share of corrupted batches that each test finds at 1 % false alarms, all ranked among the same clean batches."""
    if severity not in (0, *profile.power_severities):
        return
    watch = subject.fit(profile).watch(subject.prepare(corrupted.home), batch_size=profile.power_sizes[0])
    assert watch.reference is not None
    seen = subject.look(corrupted.home)
    tests = batch_tests(seen.take(torch.from_numpy(watch.reference.rows_to_fit(profile.n_reference))))
    held_out = {}  # the watch's held-out batches, scored by the other tests
    for size in profile.power_sizes:
        runs, count = watch.reference.held_out, len(watch.null(size).held_out)
        batches = torch.from_numpy(runs[: len(runs) // size * size].reshape(-1, size))[:count]
        held_out[size] = {name: values.cpu() for name, values in tests(seen.take(batches)).items()}
    for kind, x in corrupted.at(severity):
        shifted, prepared = subject.look(x), subject.prepare(x)
        for size in profile.power_sizes:
            rows = batch_rows(len(x), size, profile.power_batches, severity)
            tested = tests(shifted.take(rows)).items()
            p = {"watch": p_values(watch, prepared, rows)}
            p |= {name: rank_p_values(values.cpu(), held_out[size][name]) for name, values in tested}
            for method, values in p.items():
                power = float((values <= ALPHA).double().mean())
                yield {"corruption": kind, "M": size, "method": method, "power": power}


def repair(subject: Subject, corrupted: Corrupted, profile: ShiftProfile, severity: int) -> Iterator[Record]:
    """Score what the network says of corrupted images, as it is and repaired in every way."""
    bayes, labelled, n = subject.fit(profile), corrupted.inputs.validation, profile.n_pool
    if subject.name.startswith("foreign"):  # it was trained on the validation images
        labelled = Images(corrupted.home, corrupted.home_y)
    watch = bayes.watch(subject.prepare(corrupted.home), batch_size=profile.batch_size)
    tau = temperature(subject.look(labelled.x).logits[None], labelled.y)
    tuned = tune(subject, labelled, profile)
    for kind, images in corrupted.at(severity):
        x, y = subject.prepare(images[n:]), corrupted.y[n:]
        repaired = _plain_repairs(subject, tau, images, x, profile) | {"mcbn": _probs(bayes, x)}
        for method, probs in repaired.items():
            yield {"corruption": kind, "method": method, **_scores(probs, y)}
        for method, pair, pool in _pools(Images(images[:n], corrupted.y[:n]), profile, severity):
            adapted, seconds = timed(bayes.adapt, subject.prepare(pool), reference=watch)
            probs, facts = _probs(adapted, x), Record(n_pool=len(pool), adapt_seconds=round(seconds, 3))
            facts |= {field: getattr(adapted.adaptation, field) for field in ("moved", "settled", "p_value")}
            for when, of in (("before", repaired["mcbn"]), ("after", probs)) if pair else ():
                rows = torch.isin(y, torch.tensor(pair, device=y.device))
                facts |= {"pair": pair, f"pair_{when}": float(metrics.accuracy(of[rows], y[rows]))}
            yield {"corruption": kind, "method": method, **_scores(probs, y), **facts}
            if method == f"adapt {profile.unlabelled[0]}":
                twin = adapted.with_posterior(adapted.posterior.at_batch_size(tuned.posterior.batch_size))
                twin.tau = tuned.tau
                row = {"corruption": kind, "method": "adapt tuned", "M_tuned": tuned.posterior.batch_size}
                yield row | _scores(_probs(twin, x), y)


def mixture(subject: Subject, corrupted: Corrupted, profile: ShiftProfile, severity: int) -> Iterator[Record]:
    """Repair from images of two classes beside a reference of these alone: as if their classes were known."""
    bayes, n, M = subject.fit(profile), profile.n_pool, profile.batch_size
    for pair in profile.pairs if severity in profile.power_severities[1:2] else ():
        home, here = (torch.isin(y, y.new_tensor(pair)) for y in (corrupted.home_y, corrupted.y[:n]))
        watch = bayes.watch(subject.prepare(corrupted.home[home]), batch_size=M, false_alarms=RATE_OF_PAIR)
        for kind, images in corrupted.at(severity):
            pool = subject.prepare(images[:n][here][: profile.pool_of_pair])
            x, y, adapted = subject.prepare(images[n:]), corrupted.y[n:], bayes.adapt(pool, reference=watch)
            probs, rows = _probs(adapted, x), torch.isin(y, y.new_tensor(pair))
            row: Record = {"pair": pair, "pair_after": float(metrics.accuracy(probs[rows], y[rows]))}
            yield {"corruption": kind, "method": "adapt pair, known", **_scores(probs, y), **row}


@cache
def tune(subject: Subject, labelled: Images, profile: ShiftProfile) -> MCBN[Any]:
    """Choose M and a temperature on labelled images, none of them shifted."""
    x, y = (part[: profile.n_scored] for part in labelled)
    return subject.fit(profile).tune((subject.prepare(x), y), batch_sizes="auto")


def _plain_repairs(subject: Subject, tau: float, images: Tensor, x: Tensor, profile: ShiftProfile) -> dict[str, Tensor]:
    """Return probabilities (N, K) of the last N images, prepared x, by the network and with their own statistics."""
    logits, size = subject.look(images[-len(x) :]).logits, profile.unlabelled[0]
    repaired = {
        "plain": logits,
        "temperature": tau * logits,
        "batch": blended(subject.network, x, size, 1.0),
        "blend": blended(subject.network, x, size, size / (size + PSEUDO)),
        "tent": tent(subject.network, subject.prepare(images[-profile.n_tent :]))[-len(x) :],
    }
    repaired |= {f"{method} tempered": tau * repaired[method] for method in ("batch", "blend")}
    return {method: probabilities(values[None]) for method, values in repaired.items()}


def _pools(pool: Images, profile: ShiftProfile, severity: int) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield images to adapt to; clean and at the middle severity also few, and those of two classes, which it names."""
    every = severity in (0, *profile.power_severities[1:2])
    for count in profile.unlabelled if every else profile.unlabelled[:1]:
        yield f"adapt {count}", (), pool.x[:count]
    for pair in profile.pairs if every else ():
        rows = torch.isin(pool.y, torch.tensor(pair, device=pool.y.device))
        yield "adapt pair", pair, pool.x[rows][: profile.pool_of_pair]


def _probs(bayes: MCBN[Any], x: Tensor) -> Tensor:
    return torch.cat([bayes.predict(some).probs for some in torch.split(x, 1000)]).double()


def _scores(probs: Tensor, y: Tensor) -> Record:
    return {"n": len(y), **class_scores(probs, y, "accuracy", "nll", "ece")}


def ensemble(
    subjects: Sequence[Subject], corrupted: Corrupted, profile: ShiftProfile, severity: int
) -> Iterator[Record]:
    """Score the averaged probabilities of several networks, as they are and with draws of each."""
    first, together = subjects[0], MCBN([subject.network for subject in subjects], "classification")
    together.fit(first.train, n_samples=profile.n_samples, batch_size=profile.batch_size)
    for kind, images in corrupted.at(severity):
        x, y = first.prepare(images[profile.n_pool :]), corrupted.y[profile.n_pool :]
        averaged = {"ensemble": together.plain_mean(x).double(), "ensemble mcbn": _probs(together, x)}
        for method, probs in averaged.items():
            yield {"corruption": kind, "method": method, **_scores(probs, y)}


def centre(subject: Subject, corrupted: Corrupted, profile: ShiftProfile) -> Iterator[Record]:
    """Score clean images with draws of the training images and of others in their place, centred or not."""
    x, y = corrupted.x[profile.n_pool :], corrupted.y[profile.n_pool :]
    stand_ins = {name: subject.prepare(images.to(x.device)) for name, images in corrupted.inputs.far.items()}
    images: Record = {"training images": subject.train, "test images": subject.prepare(corrupted.home), **stand_ins}
    yield {"data": "none: as it is", "centre": "", **_scores(subject.look(x).logits.softmax(1), y)}
    for (name, drawn_from), where in product(images.items(), ("drawn", "running")):
        with warnings.catch_warnings(action="ignore"):  # that these disagree with the running statistics is the point
            bayes = subject.fit(profile, drawn_from, centre=where)
        yield {"data": name, "centre": where, **_scores(_probs(bayes, subject.prepare(x)), y)}


def novelty(subject: Subject, corrupted: Corrupted, profile: ShiftProfile, *, near: bool = False) -> Iterator[Record]:
    """AUROC of strange inputs against test images: foreign sets, or the classes the network never saw."""
    test, train, familiar = corrupted.inputs.test, corrupted.inputs.train, corrupted.inputs.test.x
    noise = np.random.default_rng(0).integers(0, 256, (profile.novel, 3, 32, 32), np.uint8)
    far = {**corrupted.inputs.far, "white noise": torch.from_numpy(noise)}
    sets = {name: x[: profile.novel].to(test.x.device) for name, x in far.items()}
    if near:
        train, (familiar, _) = (known(images, subject.seed) for images in (train, test))
        sets = {"new classes": test.x[is_novel(test.y, subject.seed)]}
    reference, others = cut(len(familiar), len(familiar) * 3 // 4, 0)
    watch = subject.fit(profile).watch(subject.prepare(familiar[reference]), batch_size=2)
    baselines = input_scores(subject.look(train.x), train.y)

    def judge(x: Tensor) -> dict[str, Tensor]:
        judged = watch.novelty(subject.prepare(x))
        scores = {"watch": -judged.p_value.log(), "watch and entropy": -judged.combined} | baselines(subject.look(x))
        return {name: score.double().cpu() for name, score in scores.items()}

    at_home = judge(familiar[others])
    for name, x in sets.items():
        for method, values in judge(x).items():
            yield {"data": name, "method": method, "auroc": ood_auroc(at_home[method], values), "n": len(x)}


def sensor(dataset: str, split: int) -> Iterator[Record]:
    """Let the column of a table that matters most drift, and repair it: power at 1 % (5 % on few rows), RMSE."""
    x, y = (values.float() for values in data.load(dataset))
    train, test = (torch.from_numpy(np.asarray(rows)) for rows in data.split(len(x), split))
    network = Standardized(RegressionMLP(x.shape[1], seed=split), x[train], y[train])
    train_regression(network, x[train], y[train], epochs=max(20, min(400, 200_000 // len(train))), seed=split)
    bayes = MCBN(network, "regression").fit(x[train], n_samples=50, batch_size=32, seed=split)
    shuffled = x[test][torch.randperm(len(test), generator=torch.Generator().manual_seed(0))]
    columns = torch.arange(x.shape[1])
    permuted = [bayes.predict(torch.where(columns == column, shuffled, x[test])).mean for column in columns]
    column = int(np.argmax([float(metrics.rmse(mean, y[test])) for mean in permuted]))  # the one that matters most
    rate = ALPHA if len(train) > 300 else 0.05
    size = max(2, min(SENSOR_BATCH, int(len(train) * rate / 1.5)))
    watch = bayes.watch(x[train], batch_size=size, false_alarms=rate)
    few, others = test[: len(test) // 2], test[len(test) // 2 :]
    for drift, values in drifts(x[:, column], x[train][:, column], split).items():
        drifted = torch.where(columns == column, values[:, None], x)
        readings = [watch(drifted[test[rows]]) for rows in batch_rows(len(test), size, 50, split)]
        adapted = bayes.adapt(drifted[few], reference=watch)
        errors = [float(metrics.rmse(b.predict(drifted[others]).mean, y[others])) for b in (bayes, adapted)]
        row = {"drift": drift, "M": size, "rate": rate, "power": float(np.mean([r.shifted for r in readings]))}
        yield row | {"rmse": errors[0], "adapted": errors[1], "moved": getattr(adapted.adaptation, "moved", False)}


def drifts(values: Tensor, home: Tensor, seed: int) -> dict[str, Tensor]:
    """Change a column (N,) by its mean and deviation at home: +1 deviation, x 1.5, noise of 1 deviation, dead."""
    mean, deviation = home.mean(), home.std()
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(seed)).to(values)
    changed = {"offset": values + deviation, "gain": mean + 1.5 * (values - mean), "noise": values + deviation * noise}
    return {"none": values, **changed, "dead": mean.expand(len(values))}
