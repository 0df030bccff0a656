"""Has the input shifted? One batch with an exact p-value, or a stream with a bound on false alarms over any time.

The null at a batch size M is made from reference batches of that very size, and a batch beyond its false-alarm rate is
compared again with reference batches of the classes that are predicted for it (docs/field.md says why).

Stream: a conformal test martingale (Vovk, Nouretdinov and Gammerman 2003; Volkhonskiy et al. 2017, Inductive conformal
martingales for change-point detection). Batch t has the p-value

    p_t = (#{d > D_t} + U_t #{d = D_t}) / (1 + n),    d: the n distances before and D_t itself,

independent and uniform if all batches are exchangeable. Bets e_i(p) = i p^(i - 1), i in `BETS`, begun at every t with
prior weight w_t = 1 / (t (t + 1)), keep their memory constant and never run out of capital:

    A_t,i = (A_t-1,i + w_t) e_i(p_t),    S_t = mean_i A_t,i + 1 / (t + 1),    S_0 = 1.

S is a martingale, so it ever reaches 1 / false_alarms with probability at most false_alarms (Ville 1939).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn import batches, saving
from mcbn.batch_norm import layer_of
from mcbn.engine.record import Recorder
from mcbn.errors import MCBNError, require_number
from mcbn.field.distance import Metric, Null, coordinates, fit_null, layer_means, pooled_p_value, rank_p_values
from mcbn.field.novelty import InputNull, Novelty, centre_of, class_proportions, class_weights, fit_inputs, see
from mcbn.field.reference import Reference, cut_batches, finite, not_finite, shapes_of
from mcbn.model import MCBN
from mcbn.network import is_stream

FORMAT = "mcbn watch"
FITTING = 400  # batches a distance is fitted on
MOST_HELD_OUT = 1000  # batches to rank among, where 1 / false_alarms asks for no more
NULLS_KEPT = 8  # batch sizes
POOL_BATCHES = 4  # that a pool of inputs is cut into at least
BETS = (0.05, 0.1, 0.2, 0.4, 0.7)
STREAM_TENSORS, STREAM_NUMBERS = ("bag", "log_capital"), ("n_batches", "not_finite", "log_value", "highest", "p_value")
BAG = 10_000  # distances a stream ranks among; then each new one takes a random place


class LayerReading(NamedTuple):
    """How one batch-norm call's statistics differ from the reference."""

    layer: str
    distance: float  # mean square of its statistics in standard deviations of the reference; about 1 without a shift
    p_value: float  # among the largest of all layers: any layer at all below alpha is a false alarm at rate alpha
    width: float  # standard deviation of activations over that of the reference, median over channels
    offset: float  # of the means, in standard deviations of activations; root mean square over channels


@dataclass(frozen=True, eq=False)
class Reading:
    """One batch against the reference."""

    p_value: float  # rank of the distance among R held-out batches of the same size: exact under exchangeability
    distance: float  # D (`mcbn.field.distance`)
    kind: str  # "none"; "inputs": shifted; "classes": only their mixture is another; "not finite": NaN, infinity
    layers: tuple[LayerReading, ...]  # one entry a batch-norm call, in calling order
    false_alarms: float  # the rate asked for
    class_p_value: float | None = None  # among batches of the predicted classes, if asked; approximate: they overlap

    @property
    def shifted(self) -> bool:
        """Are the inputs others than in the reference, at the false-alarm rate asked for?"""
        return self.kind in ("inputs", "not finite")

    def row(self) -> dict[str, Any]:
        """Return it as a row of a table; layer_NAME is how far that layer is, about 1 at home."""
        said = {"p_value": self.p_value, "distance": self.distance, "kind": self.kind, "explanation": self.explain()}
        return said | {f"layer_{layer.layer}": layer.distance for layer in self.layers}

    def explain(self) -> str:
        """Say in a sentence what was seen, and where."""
        if self.kind == "not finite":
            return "not finite: the batch, or what the network makes of it, holds NaN or infinity"
        p = f"(p = {self.p_value:.2g})"
        if self.kind == "none":
            return f"no shift {p}"
        if self.kind == "classes":
            return f"other classes, same inputs: the batch fits reference inputs of the classes predicted for it {p}"
        far = [layer for layer in self.layers if layer.p_value <= self.false_alarms]
        if not far:
            return f"shifted {p}: many layers by little, none by itself"
        where = f"from layer {far[0].layer} on ({len(far)} of {len(self.layers)} layers)"
        moved = f"means moved by {far[0].offset:.2f} standard deviations"
        return f"{where}: activations {times(far[0].width)} in the reference, {moved} {p}"


def times(width: float) -> str:
    """Say how wide activations are beside those of the reference."""
    if 0.95 < width < 1.05:
        return "as wide as"
    return f"{width:.2g} times wider than" if width > 1 else f"{1 / width:.2g} times narrower than"


@dataclass(frozen=True)
class Evidence:
    """Where a stream stands: S_t against shift, the alarm once it reached 1 / false_alarms, and what is waiting."""

    value: float  # S_t; S_t - 1 is what a gambler against the null would have won
    limit: float  # 1 / false_alarms
    shifted: bool  # the limit was reached now or before
    n_batches: int  # t
    p_value: float | None  # of the last batch; None: none yet
    waiting: int  # inputs until now too few for a batch
    not_finite: int  # batches with NaN or infinity among them: an alarm of its own, whatever the value


class Martingale:
    """The test martingale of a stream of distances, after those of held-out batches (R,)."""

    def __init__(self, held_out: Tensor, seed: int) -> None:
        self.bag, self.seed, self.n_batches, self.not_finite = held_out.numpy().copy(), seed, 0, 0
        self.log_capital = np.full(len(BETS), -math.inf)  # log A_t,i
        self.log_value = self.highest = 0.0  # log S_t, and its maximum
        self.p_value: float | None = None  # of the last batch
        self.waiting: Any = None  # inputs that do not fill a batch yet

    def rank(self, distance: float) -> float:
        """Return the smoothed p-value of the next distance, and put it among the others."""
        self.n_batches, self.not_finite = self.n_batches + 1, self.not_finite + math.isinf(distance)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, self.n_batches]))
        larger, equal = int((self.bag > distance).sum()), 1 + int((self.bag == distance).sum())
        p_value = (larger + generator.uniform() * equal) / (1 + len(self.bag))
        self.bag = np.append(self.bag, distance)
        if len(self.bag) > BAG:  # a random one goes, the new one as likely as any: the rest is exchangeable as before
            self.bag = np.delete(self.bag, generator.integers(len(self.bag)))
        return float(p_value)

    def bet(self, p_value: float, class_p_value: float | None = None) -> None:
        """Bet on the p-value of the next batch; the larger one of its classes is safe, since every bet falls in p."""
        self.p_value, p_value = p_value, max(p_value, class_p_value or 0.0)
        t, bets = self.n_batches, np.array(BETS)
        staked = np.logaddexp(self.log_capital, -math.log(t * (t + 1)))
        self.log_capital = staked + np.log(bets) + (bets - 1) * math.log(max(p_value, 1e-12))
        mean = np.logaddexp.reduce(self.log_capital) - math.log(len(BETS))
        self.log_value = float(np.logaddexp(mean, -math.log(t + 1)))
        self.highest = max(self.highest, self.log_value)


class Watch:
    """Tells whether batches, streams and single inputs are like a reference; made by `MCBN.watch`.

    Calling it reads one batch of any size; `update` follows a stream; `novelty` judges inputs one by one.
    """

    def __init__(
        self, bayes: MCBN[Any], *, reference: Reference | None, batch_size: int, false_alarms: float, seed: int
    ) -> None:
        self.network, self.task = bayes.engine.network, bayes.task
        self.known = self.network  # the last that was found to have these weights
        self.centre = centre_of(bayes.posterior)
        self.reference, self.shapes = reference, reference.shapes if reference else None
        self.batch_size, self.false_alarms, self.seed = batch_size, false_alarms, seed
        self.recorder = Recorder(self.network, frozenset(map(layer_of, self.channels)))
        self.nulls: dict[int, Null] = {}

    @property
    def channels(self) -> dict[str, int]:
        """C of every batch-norm call that is watched."""
        return {name: len(mean) for name, mean in self.centre[0].items()}

    def __call__(self, x: Any) -> Reading:
        """Read one batch of inputs, as `predict` takes them."""
        x = self.require_inputs(x)
        null, z = self.null(batches.size_of(x)), self.coordinates(x)
        distance = math.inf if z is None else float(null.metric(z))
        p_value = float(rank_p_values(torch.tensor([distance], dtype=torch.float64), null.held_out))
        if z is None:
            far = tuple(LayerReading(name, math.inf, p_value, math.nan, math.nan) for name in self.channels)
            return Reading(p_value, distance, "not finite", far, self.false_alarms)
        class_p = self._class_p_value(x, distance, null) if p_value <= self.false_alarms else None
        kind = "none" if p_value > self.false_alarms else "classes" if (class_p or 0) > self.false_alarms else "inputs"
        return Reading(p_value, distance, kind, self._layers(z, null), self.false_alarms, class_p)

    def update(self, x: Any) -> Evidence:
        """Take the next inputs of a stream, any number; they are read in batches of `batch_size` as they fill up."""
        whole, self.stream.waiting = cut_batches(self.stream.waiting, self.require_inputs(x), self.batch_size)
        for batch in whole:
            z, null = self.coordinates(batch), self.null(self.batch_size)
            distance = math.inf if z is None else float(null.metric(z))
            p_value = self.stream.rank(distance)
            suspect = z is not None and p_value <= self.false_alarms and not self.evidence.shifted
            self.stream.bet(p_value, self._class_p_value(batch, distance, null) if suspect else None)
        return self.evidence

    def follow(self, distance: float, class_p_value: float | None = None) -> Evidence:
        """Take a batch of `batch_size` inputs that was read already, by a call of the watch, into the stream."""
        self.stream.bet(self.stream.rank(distance), class_p_value)
        return self.evidence

    def read(self, blocks: Iterable[Any], file: str = "") -> Iterator[dict[str, Any]]:
        """Read inputs that come in blocks of any size, (n, ...) each, as the next of the stream; a rest fills no batch.

        Yields a row of a table a batch: file and row of its first input, `Reading.row`, and the evidence so far.

        >>> watch = bayes.watch(x, batch_size=4, false_alarms=0.1)
        >>> [row["row"] for row in watch.read([x[:5], x[5:9]])]
        [0, 4]
        """
        waiting, row = None, 0
        for x in blocks:
            whole, waiting = cut_batches(waiting, self.require_inputs(x), self.batch_size)
            for reading in map(self, whole):
                evidence = self.follow(reading.distance, reading.class_p_value)
                yield {"file": file, "row": row, **reading.row(), "evidence": evidence.value}
                row += self.batch_size

    @property
    def evidence(self) -> Evidence:
        """Where the stream stands."""
        stream, limit = self.stream, 1 / self.false_alarms
        waiting = 0 if stream.waiting is None else batches.size_of(stream.waiting)
        value, shifted = math.exp(min(stream.log_value, 700)), stream.highest >= math.log(limit)
        return Evidence(value, limit, shifted, stream.n_batches, stream.p_value, waiting, stream.not_finite)

    def reset(self) -> None:
        """Begin a new stream: forget distances, evidence, alarm and waiting inputs."""
        vars(self).pop("stream", None)

    @cached_property
    def stream(self) -> Martingale:
        """The stream under way; begun when it is first asked for."""
        return Martingale(self.null(self.batch_size).held_out, self.seed)

    def novelty(self, x: Any) -> Novelty:
        """Judge every input by itself: distance of its own statistics, exact p-value, combined with entropy."""
        x = self.require_inputs(x)
        seen = see(self.network, self.task, self.centre, finite(x))
        return self.input_null.novelty(seen, not_finite(x), batches.tensors_of(x)[0].device)

    def coordinates(self, x: Any) -> Tensor | None:
        """Return the coordinates (1, P) of one batch; None where they are not finite."""
        if bool(not_finite(x).any()):
            return None
        with torch.inference_mode(False), torch.no_grad():
            z = coordinates(self.recorder(x))
        return z if bool(torch.isfinite(z).all()) else None

    def all_coordinates(self, batch_stream: Iterator[Any]) -> Tensor:
        """Return the coordinates of every batch, (n, P)."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([coordinates(block) for block in self.recorder.all(batch_stream)])

    def null(self, size: int) -> Null:
        """Return the null of batches of this size; made when it is first asked for, the last few are kept."""
        if size not in self.nulls:
            self.nulls[size] = self._make_null(size)
            if len(self.nulls) > NULLS_KEPT:
                del self.nulls[next(M for M in self.nulls if M not in (self.batch_size, size))]
        return self.nulls[size]

    def _make_null(self, size: int) -> Null:
        reference, count = self.require_reference(f"batches of {size}"), self.require_enough(size)
        try:
            fitting = self.all_coordinates(reference.overlapping(size, FITTING))
        except MCBNError as error:
            if size > 1 or "one value a channel" not in str(error):
                raise
            fault = f"one input has no batch statistics here: {error.args[0].split(', which')[0]}"
            raise MCBNError(f"{fault}; read 2 or more, or judge single inputs by watch.novelty(x)") from error
        held_out = self.all_coordinates(reference.disjoint(size, count))
        if not bool(torch.isfinite(fitting).all() and torch.isfinite(held_out).all()):
            raise MCBNError("the network gives non-finite statistics on the reference; give inputs it was made for")
        return fit_null(fitting, held_out, self.channels)

    def require_enough(self, size: int) -> int:
        """Return how many held-out batches of this size there are, and refuse a reference too small for the rate."""
        reference, needed = self.require_reference(f"batches of {size}"), needed_batches(self.false_alarms)
        count = reference.count(size, max(MOST_HELD_OUT, needed))
        if count < needed:
            there = f"which for batches of {size} is a reference of {reference.needed(size, needed)} inputs"
            fault = f"false_alarms={self.false_alarms} takes {needed} held-out batches, {there}"
            cure = f"batches of at most {largest}, " if (largest := reference.largest(needed)) else ""
            raise MCBNError(f"{fault}; it has {reference.n_inputs}: give more, {cure}or a larger false_alarms")
        return count

    @cached_property
    def input_null(self) -> InputNull:
        """The null of single inputs; made when it is first asked for."""
        with torch.inference_mode(False):
            return fit_inputs(self.network, self.task, self.centre, self.require_reference("single inputs"))

    def pool_p_value(self, pool: Any) -> float:
        """Test many inputs at once, cut into batches: an exact p-value, the larger one where classes may explain it."""
        N = batches.size_of(pool)
        size = min(N, self.batch_size, max(2, N // POOL_BATCHES))  # one batch alone can hardly reach 1 %
        null = self.null(size)
        distances = null.metric(self.all_coordinates(cut_batches(None, pool, size)[0]))
        p_value = pooled_p_value(distances, null.held_out, seed=self.seed)
        mixed = self._mixed(pool, size) if p_value <= self.false_alarms else None
        if mixed is None:
            return p_value
        return max(p_value, pooled_p_value(distances, null.metric(self.all_coordinates(mixed)), seed=self.seed))

    def save(self, path: str | Path) -> None:
        """Write nulls, stream and settings as one safetensors file; the reference itself is not in it.

        A loaded watch reads batches of the sizes that were read before saving, streams, and single inputs; for other
        sizes load it with the reference. Inputs of a stream that wait for more are not kept.
        """
        saving.save(path, *_packed(self))

    def export(self, path: str | Path, example_x: Any, *, each: bool = False) -> None:
        """Write the watch as one ONNX file that runs without mcbn or torch; outputs distance and p_value.

        Args:
            path: the file; its folder exists.
            example_x: a batch of inputs. Its shape is fixed, for a batch its number too: every size has its own null.
            each: judge every input by itself, as `novelty` does, whatever their number: (N,) each. Otherwise the batch
                as a whole, as calling the watch does: (1,) each, without the comparison with other classes.
        """
        from mcbn.export import watch_to_onnx

        watch_to_onnx(self, path, example_x, each=each)

    @classmethod
    def load(cls, path: str | Path, bayes: MCBN[Any], *, reference: Any = None) -> "Watch":
        """Read a saved watch of this fitted network; with its reference it reads batches of any size again."""
        tensors, metadata = saving.read_tensors(path)
        with saving.damage_told(path):
            if metadata.get("format") != FORMAT:
                raise MCBNError(f"{path} is a safetensors file but not an mcbn watch; write one with Watch.save")
            here = saving.fingerprint(bayes.engine.network.module)
            saving.require_same_structure(path, json.loads(metadata["structure"]), json.loads(here["structure"]))
            _require_weights(f"the watch {path}", metadata, here)
            settings = json.loads(metadata["settings"])
            watch = cls(bayes, reference=None, **{n: settings[n] for n in ("batch_size", "false_alarms", "seed")})
            _restore(watch, tensors, settings)
            watch.require_network_of(bayes)
        if reference is not None:
            watch.reference = Reference(reference, watch.network, bayes.inputs, run=settings["run"], seed=watch.seed)
        return watch

    def require_inputs(self, x: Any) -> Any:
        """Check inputs against the reference and return them, the columns of a table by name."""
        if is_stream(x):
            raise MCBNError("a watch reads one batch of inputs at a time; loop over the loader")
        x = batches.by_name(x, self.network.columns)
        batches.require_int("the number of inputs", batches.size_of(x), 1)
        shapes = shapes_of(x)
        if self.shapes is not None and shapes != self.shapes:
            fault = f"inputs have shape {shapes}, those of the reference {self.shapes} (without their number)"
            raise MCBNError(f"{fault}: a watch knows one shape; make one with a reference of this shape")
        if not self.network.proven:  # of a loaded network: its first run proves it, and must not be recorded
            inputs = self.network.prepare(finite(x))
            self.network.settle(inputs)
            self.network.run_copy(inputs)
        return x

    def require_network_of(self, bayes: MCBN[Any]) -> None:
        """Refuse an MCBN of another network, or of other layers."""
        if bayes.posterior.channels != self.channels:
            fault = f"the watch is of layers (channels) {self.channels}, this network has {bayes.posterior.channels}"
            raise MCBNError(f"{fault}: make a watch with this network, bayes.watch(reference)")
        if self.known is not bayes.engine.network:
            _require_weights("the watch", *map(saving.fingerprint, (self.known.module, bayes.engine.network.module)))
            self.known = bayes.engine.network

    def _layers(self, z: Tensor, null: Null) -> tuple[LayerReading, ...]:
        widths, location = [C for C in self.channels.values() for _ in range(2)], null.metric.location
        moved, home = (torch.split(part, widths, 1) for part in (z - location, location[None]))  # means, log variances
        offsets = layer_means(torch.cat(moved[::2], 1).square() / torch.cat(home[1::2], 1).exp(), widths[::2]).sqrt()
        distances = layer_means(null.metric.standardize(z).square(), [2 * C for C in widths[::2]])
        wider = torch.stack([log_var.median() for log_var in moved[1::2]]).mul(0.5).exp()
        columns = distances[0], null.layers(z, self.channels)[0], wider, offsets[0]
        rows = zip(self.channels, *(column.tolist() for column in columns), strict=True)
        return tuple(LayerReading(*row) for row in rows)

    def _class_p_value(self, x: Any, distance: float, null: Null) -> float | None:
        """Rank a batch among reference batches of the classes predicted for it; None where there are none.

        Sequential, as Besag and Clifford 1991: the first of B batches that is as far, the l-th, ends it with p = 1 / l;
        if none is, p = 1 / (B + 1).
        """
        mixed = self._mixed(x, batches.size_of(x))
        if mixed is None:
            return None
        for number, batch in enumerate(mixed, start=1):
            z = self.coordinates(batch)
            if z is not None and float(null.metric(z)) >= distance:
                return 1 / number
        return 1 / (1 + needed_batches(self.false_alarms))

    def _mixed(self, x: Any, size: int) -> Iterator[Any] | None:
        """Yield reference batches of this size in the class proportions of x, as predicted; None where it cannot be."""
        if self.reference is None or self.task != "classification" or not self.input_null.probs.shape[1]:
            return None
        null, seen = self.input_null, see(self.network, self.task, self.centre, x, classes_only=True)
        weights = class_weights(null.probs, class_proportions(seen.probs, null.probs))
        return self.reference.weighted(null.rows, weights, size, needed_batches(self.false_alarms))

    def require_reference(self, purpose: str) -> Reference:
        """Refuse what a watch without its reference cannot do."""
        if self.reference is None:
            held = f"loaded without its reference, it holds batches of {sorted(self.nulls)}"
            raise MCBNError(f"this watch has nothing for {purpose}: {held}; Watch.load(path, bayes, reference=...)")
        return self.reference

    def __repr__(self) -> str:
        return f"Watch({len(self.channels)} layers, batch_size={self.batch_size}, false_alarms={self.false_alarms})"


def needed_batches(false_alarms: float) -> int:
    """Say how many held-out batches it takes to reach p <= alpha at all: 1 / (1 + R) <= alpha."""
    return math.ceil(1 / false_alarms - 1e-9) - 1


def make_watch(
    bayes: MCBN[Any], data: Any, *, batch_size: int | None, false_alarms: float, run: int, seed: int
) -> Watch:
    """Make a watch of a fitted network and reference inputs: `MCBN.watch` says how."""
    false_alarms = require_number("false_alarms", false_alarms)
    seed, run = batches.require_int("seed", seed, 0), batches.require_int("run", run, 1)
    reference = Reference(data, bayes.engine.network, bayes.inputs, run=run, seed=seed)
    if batch_size is None:
        drawn, largest = bayes.posterior, reference.largest(needed_batches(false_alarms))
        batch_size = max(2, min(reference.source.batch_size or drawn.fitted_batch_size or drawn.batch_size, largest))
    size = batches.require_int("batch_size", batch_size, 1)
    watch = Watch(bayes, reference=reference, batch_size=size, false_alarms=false_alarms, seed=seed)
    watch.require_enough(size)
    watch.coordinates(watch.require_inputs(reference.take(np.arange(2))))  # refuse another network's now, not later
    return watch


def _require_weights(watch: str, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse a watch of other weights; those of another dtype are not compared."""
    if there["weights_dtype"] == here["weights_dtype"] and there["weights"] != here["weights"]:
        raise MCBNError(f"{watch} is of other weights than this network has; make one for these, or give its reference")


def _packed(watch: Watch) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {f"stream.{name}": torch.as_tensor(getattr(watch.stream, name)) for name in STREAM_TENSORS}
    for kind, values in zip(saving.KINDS, watch.centre, strict=True):
        tensors |= {f"centre.{kind}.{name}": value for name, value in values.items()}
    nulls: dict[str, Null | InputNull] = {f"null.{size}": null for size, null in watch.nulls.items()}
    if watch.reference is not None or "input_null" in vars(watch):
        nulls["inputs"] = watch.input_null
    for prefix, null in nulls.items():
        tensors |= {f"{prefix}.metric.{name}": value for name, value in null.metric._asdict().items()}
        tensors |= {f"{prefix}.{name}": getattr(null, name) for name in null._fields[1:]}
    settings = {name: getattr(watch, name) for name in ("batch_size", "false_alarms", "seed", "channels", "shapes")}
    settings |= {"run": watch.reference.run if watch.reference else 1, "sizes": list(watch.nulls)}
    settings["stream"] = {name: getattr(watch.stream, name) for name in STREAM_NUMBERS}
    return tensors, {"format": FORMAT, "settings": json.dumps(settings), **saving.fingerprint(watch.network.module)}


def _restore(watch: Watch, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    def null(kind: Any, prefix: str) -> Any:
        metric = Metric(*(tensors[f"{prefix}.metric.{name}"] for name in Metric._fields))
        return kind(metric, *(tensors[f"{prefix}.{name}"] for name in kind._fields[1:]))

    device = watch.network.device
    mean, var = ({n: tensors[f"centre.{kind}.{n}"].to(device) for n in settings["channels"]} for kind in saving.KINDS)
    watch.centre = mean, var
    watch.nulls = {size: null(Null, f"null.{size}") for size in settings["sizes"]}
    if "inputs.held_out" in tensors:
        watch.input_null = null(InputNull, "inputs")
    watch.shapes = [tuple(shape) for shape in settings["shapes"]]
    watch.reset()
    vars(watch.stream).update({name: tensors[f"stream.{name}"].numpy() for name in STREAM_TENSORS} | settings["stream"])
