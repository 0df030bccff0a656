"""MCBN: a trained batch-normalised network as a Bayesian one."""

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from mcbn import batch_norm, batches, diagonal, moments, noise as levels, prediction, saving
from mcbn.batching import draw_batches, require_share
from mcbn.check import drift
from mcbn.engine.record import DECIDING, record
from mcbn.engine.run import Engine
from mcbn.errors import MCBNError, require_choice, require_number
from mcbn.layers import Layers, candidates, choose
from mcbn.linear import Linearizer
from mcbn.network import Network, Output, is_stream, read_place, refuse_sharded, unwrap, warn_if_synchronised
from mcbn.outputs import OutputReading, join_head, require_outputs
from mcbn.posterior import FAMILIES, Posterior
from mcbn.prediction import ClassificationPrediction, RegressionPrediction

if TYPE_CHECKING:
    from mcbn.check.diagnosis import Diagnosis
    from mcbn.conformal import Calibration
    from mcbn.field.adapt import Adaptation
    from mcbn.field.watch import Watch

METHODS = ("sample", "linear")
CENTRES = ("drawn", "running")
NOT_FITTED = "not fitted yet; call fit(training_data) first"
P = TypeVar("P", RegressionPrediction, ClassificationPrediction)
Classes = Literal["classification", "multilabel"]
Networks = nn.Module | Sequence[nn.Module]


class Options(TypedDict, total=False):
    """What the constructor takes by keyword, as its overloads by task repeat it."""

    layers: Layers
    inputs: batches.Picker
    output: Output
    outputs: str
    noise: str


class MCBN(Generic[P]):
    """Monte Carlo batch normalisation of a trained network (Teye et al. 2018, Algorithm 1).

    `fit` draws T joint sets of batch-norm statistics from training batches; `predict` runs the network with each and
    gives predictive moments. The network itself is copied at `fit` and never modified.

    Args:
        model: any module that uses batch norm; wrappers (torch.compile, DataParallel) are looked through. Of a list of
            networks, an ensemble, each has draws (`mcbn.members.Members`).
        task: "regression", "classification" (one label an input, or one a pixel; one unit is a binary logit), or
            "multilabel" (labels that do not exclude each other, a unit each).
        layers: which batch norm layers are stochastic: None all, k the first k to run, names, or f(name, module).
        inputs: what of a batch goes to the network: key, index, list of them, or function of the batch.
        output: which tensor of the network's result counts: key, index or function.
        outputs: what a classifier gives: "logits", "probs" or "log_probs"; "auto" finds out from an output.
        noise: of a regression: "constant", one tau an output; "head", the network gives D means and D log variances
            on axis 1, or a pair of them, and tau scales its variance; "full", a precision matrix of outputs (N, D).

    Example (those of the methods go on with `bayes`, a `classifier`, x (64, 3), targets y (64, 1) and labels (64,)):
        >>> import mcbn, torch
        >>> norm = torch.nn.BatchNorm1d(8, momentum=None)
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 8), norm, torch.nn.Linear(8, 1))
        >>> x = torch.randn(64, 3)
        >>> _ = network(x)  # training would have set the running statistics
        >>> bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=20, batch_size=32)
        >>> prediction = bayes.predict(x[:5])
        >>> prediction.mean.shape, prediction.epistemic.shape
        (torch.Size([5, 1]), torch.Size([5, 1]))
    """

    def __new__(cls, model: Any = None, *arguments: Any, **options: Any) -> Any:
        """Make an MCBN; of a list of networks, `mcbn.members.Members`, which has the same verbs."""
        if not isinstance(model, list | tuple):
            return super().__new__(cls)
        from mcbn.members import Members

        return Members(model, *arguments, **options)

    @overload
    def __init__(
        self: "MCBN[RegressionPrediction]", model: nn.Module, task: Literal["regression"], **options: Unpack[Options]
    ) -> None: ...

    @overload
    def __init__(
        self: "MCBN[ClassificationPrediction]", model: nn.Module, task: Classes, **options: Unpack[Options]
    ) -> None: ...

    @overload
    def __init__(self: "MCBN[Any]", model: Networks, task: str, **options: Unpack[Options]) -> None: ...

    def __init__(
        self,
        model: Networks,
        task: str,
        *,
        layers: Layers = None,
        inputs: batches.Picker = None,
        output: Output = None,
        outputs: str = "auto",
        noise: str = "constant",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise MCBNError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.task, self.outputs = levels.require_task(task), require_outputs(outputs, task)
        known = levels.NOISES if task == "regression" else levels.NOISES[:1]
        self.noise = require_choice("noise", noise, known, f" for {task}")
        self.noise_precision, self.tau_at_bound = levels.initial_tau(task, noise), False
        refuse_sharded(model)
        bare = unwrap(model)
        choose(layers, candidates(bare), bare)
        self.model, self.layers, self.inputs, self.output = model, layers, inputs, output
        self._place: tuple[torch.device | None, torch.dtype | None] = (None, None)  # where `to` put the network
        self.adaptation: Adaptation | None = None  # what `adapt` found and did
        self.moved_before = False  # by `adapt`, before it was saved: what from is not known any more
        self.calibration: Calibration | None = None  # what `calibrate` kept
        self._engine: Engine | None = None
        self._linearizer: Linearizer | None = None
        self._extended: Engine | None = None  # of draws of a Gaussian beyond those of the posterior

    def fit(
        self,
        data: Any,
        *,
        n_samples: int = 100,
        batch_size: int | None = None,
        seed: int = 0,
        posterior: str = "sample",
        inputs: batches.Picker = None,
        draws: Iterable[int] | None = None,
        centre: str = "drawn",
    ) -> Self:
        """Draw T joint sets of batch-norm statistics from random training batches of M examples.

        Args:
            data: the training DataLoader (all but its order is respected), a Dataset, tensors, arrays, a table
                (pandas), a list of examples or of batches, or another iterable of batches, taken as they come.
            n_samples: T. T * M may exceed N.
            batch_size: M, as in training; the loader's where it is not given.
            seed: draw t depends on (seed, t) alone; the global generators are left as they were.
            posterior: the family of q(omega). "sample": the drawn statistics. "gaussian": a Gaussian with their full
                covariance (`mcbn.gaussian`), which gives any number of draws; "layerwise": without covariance between
                layers; "diagonal": factorised, by one pass (Teye et al. 2018, appendix 1.3). Prefer "gaussian" to both.
            inputs: overrides the constructor's.
            draws: compute only these t of the T draws of posterior="sample", a share for `Posterior.merge`.
            centre: "drawn": the draws as they are. "running", where nobody has the training data: the spread of the
                draws from data of the same kind, their average from the network's running statistics.

        >>> bayes.fit(x, n_samples=8, batch_size=32).posterior
        Posterior(n_samples=8, batch_size=32, 1 layers, 8 channels)
        """
        if centre not in CENTRES or (centre == "running" and draws is not None):
            raise MCBNError(f'centre must be one of {list(CENTRES)}, "running" without draws=; got {centre!r}')
        require_choice("posterior", posterior, FAMILIES)
        numbers = None if draws is None else require_share(draws, n_samples, posterior)
        if batch_size is None:
            warn_if_synchronised(self.model)
        inputs, columns = self.inputs if inputs is None else inputs, batches.columns_of(data)
        data = batches.by_name(data, columns)
        if isinstance(data, list) and data and self.copy_network().runs(data[0], inputs):  # batches, not examples
            data, batch_size = batches.concatenate(data), batch_size or batches.size_of(data[0])
        once = posterior == "diagonal"  # the first draws decide how a share of them runs
        wanted = None if numbers is None else sorted({*range(min(DECIDING, n_samples))}.union(numbers))
        with torch.inference_mode(False):
            drawn = draw_batches(data, n_samples=n_samples, batch_size=batch_size, seed=seed, numbers=wanted, once=once)
            network = self.copy_network()
            if once:
                model, recorded = diagonal.observe(network, drawn, self.layers, inputs)
                fitted = Posterior(*model.statistics(n_samples, seed), drawn.batch_size, model, seed)
            else:
                recorded = record(network, drawn, self.layers, inputs)
                fitted = recorded.posterior if numbers is None else recorded.posterior.select(numbers)
                fitted = fitted if posterior == "sample" else fitted.as_gaussian(posterior, seed=seed)
            network.settle(recorded.first)
            network.columns = columns
            if centre == "running":
                from mcbn.field.adapt import centre_on_running

                fitted = centre_on_running(fitted, recorded)
            else:
                drift.warn_if_far(network, recorded)
        return self.adopt_fit(network, fitted, inputs)

    def predict(
        self,
        x: Any,
        *,
        method: str = "sample",
        n_samples: int | None = None,
        chunk_size: int | None = None,
        return_samples: bool = False,
        covariance: bool = False,
        tolerance: float | None = None,
        mean: str = "drawn",
        watch: "Watch | None" = None,
    ) -> P:
        """Predict with uncertainty: moments over the draws, streamed, so memory is bounded by one pass, whatever T.

        Args:
            x: a tensor (N, ...), an array or table, whatever the network takes, a list of these, or a DataLoader or
                Dataset.
            method: "sample", the Monte Carlo estimate over the draws; "linear", their covariance through the network's
                gradient (`mcbn.linear`): approximate, and faster for few outputs.
            n_samples: use only the first draws; of a Gaussian posterior also more than were fitted.
            chunk_size: draws in one pass; chosen from the sizes where it is not given (`explain` says how).
            return_samples: keep the raw outputs as `pred.samples`, (T, N, ...).
            covariance: regression: the full covariance over outputs as `pred.covariance`, (N, D, D).
            tolerance: stop drawing once the standard error of every mean or probability is below this; `pred.n_samples`
                says how many draws it took, of batches the fewest.
            mean: "drawn", the average over the draws; "plain", the network's own, with the spread of the draws about
                it: the better choice where `evaluate` or `check` says so.
            watch: judge each input by it as well, `pred.novelty`: is it like anything in the watch's reference?

        >>> bayes.predict(x), classifier.predict(x).label.shape
        (RegressionPrediction(shape=(64, 1), n_samples=20), torch.Size([64]))
        """
        require_choice("method", method, METHODS)
        tolerance = None if tolerance is None else require_number("tolerance", tolerance, torch.inf)
        engine, T = self.engine_for(n_samples, chunk_size)
        if watch is not None and not hasattr(watch, "require_network_of"):
            raise MCBNError(f"watch must be made by bayes.watch(reference) or loaded, got {batches.describe(watch)}")
        if watch is not None:
            watch.require_network_of(self)
        options: dict[str, Any] = {"keep": return_samples, "tolerance": tolerance}
        mean, exact = require_choice("mean", mean, moments.MEANS), self.task == "regression" and not return_samples

        def samples(inputs: Any, count: int) -> Iterator[Tensor]:  # chunks (t, N, ...)
            with torch.no_grad(), engine.network.undisturbed():
                if method == "linear":
                    yield from self.linearizer(inputs, count).draws()
                else:
                    yield from engine.outputs(inputs, count, chunk_size)

        def predict_batch(inputs: Any) -> Any:
            again = None if is_stream(x) else partial(samples, batches.copied(inputs))  # a loader's are not kept
            if method == "linear" and exact:
                pred: Any = moments.gaussian(self, self.linearizer(inputs, T), covariance=covariance, draws=again)
            else:
                pred = moments.summarise(self, samples(inputs, T), covariance=covariance, draws=again, **options)
            pred = moments.finish(pred, self, engine.network, inputs, mean=mean, method=method)
            return pred if watch is None else replace(pred, novelty=watch.novelty(inputs))

        pred: P = engine.network.over(x, predict_batch, prediction.join, self.inputs)
        return pred

    def sample(self, x: Any, *, n_samples: int | None = None, chunk_size: int | None = None) -> Tensor:
        """Return raw network outputs for every draw, (T, N, ...); differentiable in x where x requires grad.

        >>> bayes.sample(x, n_samples=5).shape
        torch.Size([5, 64, 1])
        """
        engine, T = self.engine_for(n_samples, chunk_size)

        def sample_batch(inputs: Any) -> Tensor:
            samples, reading = torch.cat(list(engine.outputs(inputs, T, chunk_size))), engine.network.reading
            return samples if reading is None else reading.restore(samples)

        return engine.network.over(x, sample_batch, lambda samples: torch.cat(samples, 1), self.inputs)

    def plain(self, x: Any) -> Tensor:
        """Return what the network says in eval mode with its own running statistics, (N, ...).

        >>> torch.equal(bayes.plain(x), bayes.model(x))
        True
        """
        network = self.network or self.copy_network()
        return network.over(x, batch_norm.BatchNormMode()(network.raw), torch.cat, self.inputs)  # as draws run

    def plain_mean(self, x: Any) -> Tensor:
        """Return the network's own mean (N, ...) or class probabilities (N, K, ...), whatever its outputs are.

        >>> classifier.plain_mean(x).shape
        torch.Size([64, 3])
        """
        network, head = self.network or self.copy_network(), self.noise == "head"
        run = batch_norm.BatchNormMode()(partial(moments.plain_mean, network, head=head))
        return network.over(x, run, torch.cat, self.inputs)

    def tune(
        self,
        data: Any,
        *,
        score: str | None = None,
        targets: batches.Picker = None,
        n_samples: int | None = None,
        ignore_index: int | None = None,
        batch_sizes: str | Sequence[int] | None = None,
    ) -> Self:
        """Set tau on held-out data: the noise precision (regression) or inverse temperature (classification).

        With `batch_sizes` also M, a temperature, by rescaling the posterior (`Posterior.at_batch_size`): the spread of
        the draws goes with 1 / sqrt(M) and is lost as training batches grow (Mukhoti et al. 2020, arXiv 2012.13220).

        Args:
            data: DataLoader, Dataset or list of (x, y) batches, or a tuple (x, y).
            score: regression: "crps" to minimise (as the paper does) or "pll" to maximise; "pll" of classes and of
                noise="full". Beyond 2^23 samples, as of many images, tau is tuned on points chosen at random.
            targets: what of a batch is the target, where it is not the second element or a usual key.
            n_samples: use only the first draws.
            ignore_index: classification: a label to leave out, such as the void class of a segmentation.
            batch_sizes: the M to try beside that of the fit, each with its best tau; "auto": from 1/16 to 16 times it.

        >>> bayes.tune((x, y)).tau < torch.inf
        True
        """
        score, T = levels.require_score(self.task, score, self.noise), self.engine_for(n_samples)[1]
        options: dict[str, Any] = {"score": score, "n_samples": T, "targets": targets, "ignore_index": ignore_index}
        drawn, M = self.posterior, self.posterior.batch_size
        if batch_sizes is None:
            tuned = {M: levels.tune(self, data, **options)}
        else:
            sizes = levels.candidates(batch_sizes, drawn.fitted_batch_size or M)
            tuned = {M: levels.tune(self.with_posterior(drawn.at_batch_size(M)), data, **options) for M in sizes}
            M = levels.best(tuned, score)
        levels.drop_calibration(self)
        if batch_sizes is not None:
            self.posterior = drawn.at_batch_size(M)
        self.noise_precision, self.tau_at_bound = tuned[M].tau, tuned[M].at_bound
        levels.warn_if_bound(tuned[M], self.task, M)
        return self

    def calibrate(self, data: Any, *, level: float | None = None, **options: Any) -> Self:
        """Make `pred.interval` and `pred.set` promises that hold: split conformal prediction (`mcbn.conformal`).

        P(y in interval or set) >= level for any network and n held-out examples, PROVIDED THAT these and new inputs
        are exchangeable (drawn alike) and were not seen by training or `tune`. Given the n, the share covered varies
        by about sqrt(level (1 - level) / n). Under shift the promise ends. `fit` and `tune` drop the calibration.

        Args:
            data: DataLoader or Dataset of (x, y) batches, or a tuple (x, y); level / (1 - level) examples at least.
            level: the default of `interval` and `set`; whether the data are enough for it is said at once.
            score: "std" (default: as wide as the prediction is unsure), "quantile" (skewed draws), "absolute" (one
                width for all); classification: "aps" (default), "raps" with penalty=(cost of a class, how many free),
                "lac" (smallest sets, some may be empty).
            joint: True: all outputs and pixels of an input at once. False: each output, or share of pixels, by itself.
            groups: "class": the promise holds for each true class (Mondrian). Or numbers (N,), one an example: it holds
                in each group, and `interval` and `set` take those of the new inputs.
            method, n_samples: as `predict` will be called.
            targets, ignore_index: as for `tune`.
            randomize: sets that cover exactly the level, by chance (seed=); they may be empty.

        >>> low, high = bayes.calibrate((x, y), score="absolute").predict(x).interval(0.9)
        >>> int(((low <= y) & (y <= high)).sum())  # of 64
        59
        """
        from mcbn.conformal import calibrate

        self.calibration = calibrate(self, data, level=level, **options)
        return self

    def watch(
        self, reference: Any, *, batch_size: int | None = None, false_alarms: float = 0.01, seed: int = 0, run: int = 1
    ) -> "Watch":
        """Watch for inputs that are not like the reference: batches, streams, single inputs (`mcbn.field`).

        A quarter of the reference fits the distance, the rest is held out and cut into batches without a common input,
        so that p-values are exact; `false_alarms` = alpha takes 1 / alpha - 1 of them.

        Args:
            reference: inputs AS DEPLOYED, as `fit` takes data: validation inputs, without training augmentation, and
                best not those the network was trained on. No labels are needed.
            batch_size: of the batches a stream is read in; by default the loader's or that of the fit, at most what the
                reference is enough for. Single batches may have any size.
            false_alarms: share of batches as in the reference that are called shifted; of a stream, the probability
                that it is ever called so.
            seed: of the cut of the reference.
            run: neighbours in the reference that belong together, such as frames of a video; batches keep them so.

        >>> watch = bayes.watch(x, batch_size=4, false_alarms=0.1)
        >>> watch(x[:4] + 5).shifted
        True
        """
        from mcbn.field.watch import make_watch

        return make_watch(self, reference, batch_size=batch_size, false_alarms=false_alarms, run=run, seed=seed)

    def adapt(self, unlabelled: Any, *, reference: Any, strength: str | float = "auto") -> Self:
        """Return another MCBN whose posterior is moved to where unlabelled inputs are now; this one stays as it is.

        `adapted.adaptation.explain()` says how far it moved and how sure that is. Adapting it again with more inputs
        is adapting to all of them at once. Layers that are not stochastic stay where they are.

        Args:
            unlabelled: inputs as deployed now, as `fit` takes data, at least 2; they are kept for a later call.
            reference: inputs as deployed before the shift, or a `watch` made of them.
            strength: "auto": nothing moves where the watch finds no shift, else each layer by what chance does not
                explain. A number from 0 to 1: that share of the move, whatever the watch says.

        >>> watch = bayes.watch(x, batch_size=4, false_alarms=0.1)
        >>> bayes.adapt(x + 5, reference=watch).adaptation.moved
        True
        """
        from mcbn.field.adapt import adapt

        return adapt(self, unlabelled, reference, strength)  # type: ignore[return-value]

    def check(self, data: Any, *, seed: int = 0, n_examples: int = 2048) -> "Diagnosis":
        """Examine the fitted draws against the training data before trusting them: `print(bayes.check(train))`.

        Per layer: are the draws Gaussian, do they spread as theory says, have they drifted from the running
        statistics, how many are they worth, what share of the predictive variance is theirs; warnings in plain words.
        All examples are run through the network, or of more than `n_examples` about so many.

        >>> bayes.check(x).n_samples
        20
        """
        from mcbn.check import diagnosis

        return diagnosis.check(self, data, seed=seed, n_examples=batches.require_int("n_examples", n_examples, 1))

    def explain(self, x: Any, *, n_samples: int | None = None, chunk_size: int | None = None) -> str:
        """Say in a sentence how the draws would run for x.

        >>> bayes.explain(x)[:22]
        '20 draws for 64 inputs'
        """
        engine, T = self.engine_for(n_samples, chunk_size)
        return engine.explain(engine.network.prepare(x), T, chunk_size)

    def export(
        self,
        path: str | Path,
        example_x: Any,
        *,
        method: str = "sample",
        n_samples: int | None = None,
        chunk_size: int | None = None,
        level: float | None = None,
    ) -> None:
        """Write the predictor as one ONNX file that runs without mcbn or torch, for any number of inputs.

        Outputs: mean, variance, epistemic (regression; variance = epistemic + 1/tau), or probs, entropy,
        mutual_information (classification): the numbers of `predict`; after `calibrate` also low and high, or set.
        `mcbn.export.to_torch_export` gives the same as a `torch.export` program.

        Args:
            path: the file; its folder exists.
            example_x: inputs as for `predict`, as many as will come at once; all but their number N is fixed.
            method: "sample", the draws as constants; "linear", the gradient and the covariance of the draws.
            n_samples: use only the first draws.
            chunk_size: draws in one pass at most, chosen from the example where it is not given; fewer than T make a
                loop, so that memory does not grow with T.
            level: of calibrated intervals or sets; by default what `calibrate` was given.

        >>> bayes.export(folder / "net.onnx", x[:1])
        """
        from mcbn import export

        export.to_onnx(self, path, example_x, method=method, n_samples=n_samples, chunk_size=chunk_size, level=level)

    @property
    def posterior(self) -> Posterior:
        """The fitted draws; set it to predict with another posterior of the same layers, such as a rescaled one."""
        return self.engine.posterior

    @posterior.setter
    def posterior(self, value: Posterior) -> None:
        if self._engine is None:
            raise MCBNError(NOT_FITTED)
        if not isinstance(value, Posterior):
            raise MCBNError(f"give a Posterior, such as that of another MCBN; got {type(value).__name__}")
        channels = self._engine.posterior.channels, value.require_valid("the posterior").channels
        if channels[0] != channels[1]:
            raise MCBNError(f"the posterior has layers (channels) {channels[1]}, this network {channels[0]}")
        levels.drop_calibration(self)
        network = self._engine.network
        self.adopt(network, value.to(network.device, network.dtype))

    @property
    def tau(self) -> float | Tensor:
        """Noise precision 1/variance: a number, one an output (D,) or a matrix (D, D); inf until tuned (classes: 1)."""
        return levels.plain(self.noise_precision)

    @tau.setter
    def tau(self, value: float | Tensor) -> None:
        tau = levels.require_tau(value, self.task)
        levels.drop_calibration(self)
        self.noise_precision, self.tau_at_bound = tau, False

    @property
    def noise_std(self) -> float | Tensor:
        """Standard deviation of the observation noise, tau^-1/2; of noise="head", what its own is multiplied by."""
        tau = self.noise_precision
        return levels.plain(tau.rsqrt() if tau.ndim < 2 else torch.linalg.inv(tau).diagonal().sqrt())

    # Keeping and moving what was fitted, in PyTorch's words.

    def save(self, path: str | Path, **notes: str) -> None:
        """Write posterior, tau, calibration and settings as one safetensors file; further text is kept beside them.

        >>> bayes.save(folder / "net.mcbn")
        """
        tensors, text = saving.pack(self)
        if taken := [n for n in notes if n in text or n in saving.OPTIONAL or not isinstance(notes[n], str)]:
            raise MCBNError(f"notes must be texts under names that mcbn does not use itself; got {taken}")
        saving.save(path, tensors, text | notes)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, inputs: batches.Picker = None, output: Output = None) -> Self:
        """Read a saved posterior for this network, onto its device; functions as inputs= or output= come again.

        >>> bayes.save(folder / "net.mcbn")
        >>> mcbn.MCBN.load(folder / "net.mcbn", bayes.model).tau
        inf
        """
        if isinstance(model, list | tuple):
            from mcbn.members import Members

            return Members.load(path, model, inputs=inputs, output=output)  # type: ignore[return-value]
        tensors, text = saving.read_tensors(path)
        with saving.damage_told(path):
            drawn = saving.unpack(str(path), tensors, text, model)
            kept: Any = {name: text[name] for name in ("outputs", "noise") if name in text}
            for name, given in (("inputs", inputs), ("output", output)):
                kept[name] = json.loads(text.get(name, "null")) if given is None else given
            return saving.restore(cls(model, text["task"], **kept), drawn, json.loads(text["tau"]), tensors, text)

    def state_dict(self) -> dict[str, Tensor]:
        """Return posterior, tau and their metadata as tensors alone: for `torch.save`, safetensors, a checkpoint.

        The network is not in it: keep `model.state_dict()` beside it.

        >>> sorted(bayes.state_dict())
        ['mean.1', 'metadata', 'tau', 'var.1']
        """
        return saving.to_state(*saving.pack(self), self.noise_precision)

    def load_state_dict(self, state: dict[str, Tensor]) -> Self:
        """Take over posterior and tau of a `state_dict` made with this network; no fit is needed before.

        The draws go to the network's device. Whatever does not fit is an error, and nothing is changed then.

        >>> mcbn.MCBN(bayes.model, "regression").load_state_dict(bayes.state_dict()).posterior.n_samples
        20
        """
        twin = copy.copy(self)
        with saving.damage_told("the state_dict"):
            tensors, text, tau = saving.from_state(state)
            for name, kept in (("task", text["task"]), ("noise", text.get("noise", "constant"))):
                if kept != getattr(self, name):
                    raise MCBNError(f"the state_dict is of {name}={kept!r}, this MCBN of {getattr(self, name)!r}")
            drawn = saving.unpack("the state_dict", tensors, text, self.model)
            twin.outputs = require_outputs(text.get("outputs", self.outputs), self.task)
            vars(self).update(vars(saving.restore(twin, drawn, tau, tensors, text)))
        return self

    def to(
        self, device: torch.device | torch.dtype | Tensor | str | int | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move the private network and its draws to a device, a floating dtype, both, or those of a tensor.

        As of a module it is done in place and returned; your own network stays. Before `fit` it says where the copy
        will be. Half precision keeps its statistics in float32, as training does.

        >>> bayes.to(torch.float64).predict(x).mean.dtype
        torch.float64
        """
        device, dtype = read_place(device, dtype)
        self._place = device or self._place[0], dtype or self._place[1]
        if self._engine is not None:
            network = self._engine.network.to(device, dtype)
            self.adopt(network, self.posterior.to(network.device, network.dtype))
        return self

    # The seam: what export, distributed fits and other code around MCBN build on.

    @property
    def network(self) -> Network | None:
        """The private, frozen copy of the network that draws run through; None until fitted."""
        return self._engine.network if self._engine else None

    @property
    def engine(self) -> Engine:
        """What runs the draws through the network; an error until fitted."""
        if self._engine is None:
            raise MCBNError(NOT_FITTED)
        if (changed := self._engine.posterior).version() != self._engine.version:  # in place, by the user
            if changed.gaussian is not None:
                raise MCBNError("a Gaussian posterior was changed in place, draws or moments alone; assign another")
            self.posterior = changed
        return self._engine

    @property
    def linearizer(self) -> Linearizer:
        """What expands the network in the drawn statistics, for method="linear"."""
        if self._linearizer is None:
            self._linearizer = Linearizer(self.engine.network, self.posterior)
        return self._linearizer

    @property
    def reads(self) -> str:
        """What the outputs of a classifier are read as: as asked, or once an input ran, what "auto" found."""
        reading = self._engine.network.reading if self._engine else None
        return self.outputs if reading is None else reading.kind

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield outputs for prepared inputs, (t, N, ...) a chunk, those of classes as logits."""
        engine, T = self.engine_for(n_samples)
        yield from engine.outputs(inputs, T)

    def engine_for(self, n_samples: int | None = None, chunk_size: int | None = None) -> tuple[Engine, int]:
        """Check how many draws are asked for, and how many in one pass; return what runs them, and T."""
        if chunk_size is not None:
            batches.require_int("chunk_size", chunk_size, 1)
        drawn = self.posterior
        T = drawn.n_samples if n_samples is None else batches.require_int("n_samples", n_samples, 1)
        if drawn.n_samples >= T:
            return self.engine, T
        if drawn.gaussian is None:
            cure = "fit more of them, or a Gaussian, which gives any number"
            raise MCBNError(f"n_samples={T} asked of a posterior of {drawn.n_samples} draws; {cure}")
        if self._extended is None or self._extended.posterior.n_samples < T:
            with torch.inference_mode(False):
                self._extended = Engine(self.engine.network, drawn.sample(T, seed=drawn.seed))
        return self._extended, T

    def copy_network(self) -> Network:
        """Copy the network, to where `to` asked for it, and let the copy tell which of its modules is running."""
        output = join_head if self.noise == "head" and self.output is None else self.output
        reading = None if self.task == "regression" else OutputReading(self.outputs, self.task == "multilabel")
        network = Network(self.model, output, reading).to(*self._place)
        batch_norm.watch(network.module)
        return network

    def adopt(self, network: Network, posterior: Posterior) -> Self:
        """Predict from now on with this copy of the network and these draws."""
        self._engine, self._linearizer, self._extended = Engine(network, posterior), None, None
        return self

    def adopt_fit(self, network: Network, posterior: Posterior, inputs: batches.Picker) -> Self:
        """Take over a new fit, for the verb that a user called: what was found for the draws before it goes."""
        levels.drop_calibration(self, stacklevel=4)
        self.inputs, self.adaptation, self.moved_before, self.tau_at_bound = inputs, None, False, False
        return self.adopt(network, posterior)

    def with_posterior(self, posterior: Posterior | None, *, model: nn.Module | None = None) -> Self:
        """Return another MCBN with these draws, of this network or of `model`; not fitted where there are none.

        >>> bayes.with_posterior(bayes.posterior.at_batch_size(64)).posterior.batch_size
        64
        """
        twin = copy.copy(self)
        twin.model = self.model if model is None else model
        twin._engine = twin._linearizer = twin._extended = twin.calibration = None
        if posterior is not None:
            twin.adopt(self.engine.network if model is None else twin.copy_network(), posterior)
        return twin

    def __repr__(self) -> str:
        state = repr(self._engine.posterior) if self._engine else "not fitted"
        how = {"outputs": self.reads} if self.task != "regression" else {"noise": self.noise}
        said = "".join(f", {name}={value!r}" for name, value in how.items() if value not in ("logits", "constant"))
        return f"MCBN({type(unwrap(self.model)).__name__}, {self.task!r}{said}, tau={self.tau}, {state})"
