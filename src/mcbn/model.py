"""MCBN: a trained batch-normalised network as a Bayesian one."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from mcbn import batches, export, noise, prediction, synchronised
from mcbn import diagonal as moments
from mcbn import moments as streaming
from mcbn.batching import draw_batches, pass_over, require_share
from mcbn.check import diagnosis as diagnostics
from mcbn.check import drift
from mcbn.engine.record import record, with_deciding
from mcbn.engine.run import Engine
from mcbn.errors import MCBNError
from mcbn.gaussian import require_family
from mcbn.layers import Layers, candidates, choose
from mcbn.linear import Linearizer
from mcbn.network import Network, Output, refuse_sharded, unwrap
from mcbn.portable import Portable
from mcbn.posterior import Posterior
from mcbn.prediction import ClassificationPrediction, RegressionPrediction
from mcbn.randomness import isolated_random

METHODS = ("sample", "linear")
P = TypeVar("P", RegressionPrediction, ClassificationPrediction)


class Options(TypedDict, total=False):
    """What the constructor takes by keyword, as its overloads by task repeat it."""

    layers: Layers
    inputs: batches.Picker
    output: Output


class MCBN(Portable, Generic[P]):
    """Monte Carlo batch normalisation of a trained network (Teye et al. 2018, Algorithm 1).

    `fit` draws T joint sets of batch-norm statistics from training batches; `predict` runs the network with each and
    gives predictive moments. The network itself is copied at `fit` and never modified.

    Args:
        model: any module that uses batch norm; wrappers (torch.compile, DataParallel) are looked through.
        task: "regression", or "classification" (one label an input, or one a pixel).
        layers: which batch norm layers are stochastic: None all, k the first k to run, names, or f(name, module).
        inputs: what of a batch goes to the network: key, index, list of them, or function of the batch.
        output: which tensor of the network's result counts: key, index or function.
    """

    @overload
    def __init__(
        self: "MCBN[RegressionPrediction]",
        model: nn.Module,
        task: Literal["regression"],
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self: "MCBN[ClassificationPrediction]",
        model: nn.Module,
        task: Literal["classification"],
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(self: "MCBN[Any]", model: nn.Module, task: str, **options: Unpack[Options]) -> None: ...

    def __init__(
        self,
        model: nn.Module,
        task: str,
        *,
        layers: Layers = None,
        inputs: batches.Picker = None,
        output: Output = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise MCBNError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__(task, inputs)
        refuse_sharded(model)
        bare = unwrap(model)
        choose(layers, candidates(bare), bare)
        self.model, self.layers, self.output = model, layers, output
        self._engine: Engine | None = None
        self._extended: Engine | None = None  # draws of a Gaussian beyond those of the posterior

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
    ) -> Self:
        """Draw T joint sets of batch-norm statistics from random training batches of M examples.

        Args:
            data: the training DataLoader (its dataset, transforms, collate_fn, workers and batch size are respected,
                its order is not), a Dataset, tensors, or an iterable of batches, taken as they come.
            n_samples: T. T * M may exceed N.
            batch_size: M, as in training; the loader's where it is not given.
            seed: draw t depends on (seed, t) alone; the global generators are left as they were.
            posterior: the family of q(omega). "sample": the drawn statistics themselves. "gaussian": a Gaussian with
                their full covariance, across units and layers; "layerwise": across the units of each layer only. Both
                are kept as moments (`mcbn.gaussian`), whatever the size of the data, and give any number of draws.
                "diagonal": the factorised Gaussian of Teye et al. 2018, appendix 1.3, from the moments of one pass
                over the data (`mcbn.diagonal`; of a stream, its first T full batches). It ignores that statistics move
                together, which is not safe: prefer "gaussian".
            inputs: overrides the constructor's.
            draws: compute only these t of the T draws, a share for `Posterior.merge`; `mcbn.distributed.fit` and
                `mcbn.ray.fit` share them out. Only for posterior="sample": merge, then `as_gaussian`.
        """
        require_family(posterior)
        numbers = None if draws is None else require_share(draws, n_samples, posterior)
        if batch_size is None:
            synchronised.warn_if_synchronised(self.model)
        inputs = self.inputs if inputs is None else inputs
        with torch.inference_mode(False), isolated_random(seed if isinstance(seed, int) else None):
            if posterior == "diagonal":
                drawn = pass_over(data, most=n_samples, batch_size=batch_size, seed=seed)
                network = self._watched()
                model, recorded = moments.observe(network, drawn, self.layers, inputs)
                fitted = Posterior.from_gaussian(model, n_samples, drawn.batch_size, seed=seed)
            else:
                if posterior != "sample":
                    batches.require_int(f"n_samples for the covariance of posterior={posterior!r}", n_samples, 2)
                run = None if numbers is None else with_deciding(numbers, n_samples)
                drawn = draw_batches(data, n_samples=n_samples, batch_size=batch_size, seed=seed, numbers=run)
                network = self._watched()
                recorded = record(network, drawn, self.layers, inputs)
                fitted = recorded.posterior if numbers is None else recorded.posterior.select(numbers)
                fitted = fitted if posterior == "sample" else fitted.as_gaussian(posterior, seed=seed)
            drift.warn_if_far(network, recorded)
        self._set(network, fitted)
        self.inputs = inputs
        return self

    def _set(self, network: Network, drawn: Posterior) -> None:
        self._engine, self._linearise, self._extended = Engine(network, drawn), Linearizer(network, drawn), None

    @property
    def network(self) -> Network | None:
        """The private, frozen copy of the network that draws run through; None until fitted."""
        return self._engine.network if self._engine else None

    @property
    def posterior(self) -> Posterior:
        """The fitted draws; set it to predict with another posterior of the same layers, such as a rescaled one."""
        return self._fitted().posterior

    @posterior.setter
    def posterior(self, value: Posterior) -> None:
        shapes = [{name: part.shape[1] for name, part in p.mean.items()} for p in (self.posterior, value)]
        if shapes[0] != shapes[1]:
            raise MCBNError(f"the posterior has layers (channels) {shapes[1]}, this network {shapes[0]}")
        network = self._fitted().network
        self._set(network, value.to(network.device))

    def _fitted(self) -> Engine:
        if self._engine is None:
            raise MCBNError("not fitted yet; call fit(training_data) first")
        return self._engine

    def _running(self) -> Network:
        return self._fitted().network

    @property
    def noise_std(self) -> float | Tensor:
        """Standard deviation of the observation noise, tau^-1/2."""
        std = self._tau.rsqrt()
        return std.item() if std.ndim == 0 else std

    def plain(self, x: Any) -> Tensor:
        """Return what the network says in eval mode with its own running statistics."""
        network = self.network or Network(self.model, self.output).to(*self._placement)
        return self._over(x, network, lambda inputs: network(batches.map_tensors(torch.clone, inputs)), torch.cat)

    def sample(self, x: Any, *, n_samples: int | None = None, chunk_size: int | None = None) -> Tensor:
        """Return raw network outputs for every draw, (T, N, ...); differentiable in x where x requires grad."""
        engine, T = self._drawing(n_samples, chunk_size)

        def sample_one(inputs: Any) -> Tensor:
            return torch.cat(list(engine.outputs(inputs, T, chunk_size)))

        return self._over(x, engine.network, sample_one, lambda parts: torch.cat(parts, 1))

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
        compile: bool = False,
    ) -> P:
        """Predict with uncertainty: moments over the draws, streamed, so memory is bounded by one pass, whatever T.

        Args:
            x: a tensor, whatever the network takes, or a DataLoader or Dataset of batches.
            method: "sample", the Monte Carlo estimate over the draws; "linear", the covariance of the draws
                through the network's gradient, the mean from 8 of them: faster for few outputs, approximate
                (`mcbn.linear`).
            n_samples: use only the first draws; of a Gaussian posterior also more than were fitted.
            chunk_size: draws in one pass; chosen from the sizes where it is not given (`explain` says how).
            return_samples: keep the raw outputs as `pred.samples`, (T, N, ...).
            covariance: regression: the full covariance over outputs as `pred.covariance`, (N, D, D).
            tolerance: stop drawing once the standard error of every mean or probability is below this, at the latest
                after all draws; `pred.n_samples` says how many it took, `pred.standard_error` what was reached.
            compile: run passes of method="sample" through `torch.compile`: worth its time for many calls of one shape.
        """
        if method not in METHODS:
            raise MCBNError(f"method must be one of {list(METHODS)}, got {method!r}")
        if tolerance is not None and not tolerance > 0:
            raise MCBNError(f"tolerance must be a positive number in the units of the prediction, got {tolerance!r}")
        engine, T = self._drawing(n_samples, chunk_size)
        linearise, stream = self._linearise, isinstance(x, DataLoader | Dataset)

        def draws(inputs: Any) -> Iterator[Tensor]:
            with torch.no_grad():
                if method == "linear":
                    yield from linearise(inputs, T).draws()
                else:
                    yield from engine.outputs(inputs, T, chunk_size, compile)

        def predict_one(inputs: Any) -> Any:
            if self.task == "classification":
                return streaming.classification(draws(inputs), self._tau, keep=return_samples, tolerance=tolerance)
            again = None if stream else partial(draws, inputs)
            if method == "linear" and not return_samples:
                found = linearise(inputs, T)
                return streaming.gaussian(
                    found.mean, found.projected, self._tau, n_samples=T, covariance=covariance, draws=again
                )
            return streaming.regression(
                draws(inputs), self._tau, covariance=covariance, keep=return_samples, tolerance=tolerance, draws=again
            )

        return self._over(x, engine.network, predict_one, prediction.join)  # type: ignore[no-any-return]

    def check(
        self, data: Any, *, seed: int = 0, n_examples: int = diagnostics.ENOUGH_EXAMPLES
    ) -> diagnostics.Diagnosis:
        """Examine the fitted draws against the training data before trusting them: `print(bayes.check(train))`.

        Per layer: are the draws Gaussian, do they spread as theory says, have they drifted from the running
        statistics, how many are they worth, what share of the predictive variance is theirs; warnings in plain words.
        All examples are run through the network, or of more than `n_examples` about so many.
        """
        return diagnostics.check(self, data, seed=seed, n_examples=batches.require_int("n_examples", n_examples, 1))

    def explain(self, x: Any, *, n_samples: int | None = None, chunk_size: int | None = None) -> str:
        """Say in a sentence how the draws would run for x."""
        engine, T = self._drawing(n_samples, chunk_size)
        return engine.explain(engine.network.prepare(x), T, chunk_size)

    def _drawing(self, n_samples: int | None, chunk_size: int | None) -> tuple[Engine, int]:
        """Check the options that say how many draws run, and how many at a time; return who runs them, and T."""
        if chunk_size is not None:
            batches.require_int("chunk_size", chunk_size, 1)
        engine, drawn = self._fitted(), self.posterior
        T = drawn.n_samples if n_samples is None else batches.require_int("n_samples", n_samples, 1)
        if drawn.n_samples >= T:
            return engine, T
        if drawn.gaussian is None:
            raise MCBNError(
                f"n_samples={T} asked of a posterior of {drawn.n_samples} draws; fit more of them, or a Gaussian "
                "posterior, which gives any number"
            )
        extended = self._extended
        if extended is None or extended.posterior.n_samples < T:
            with torch.inference_mode(False):
                extended = self._extended = Engine(engine.network, drawn.sample(T, seed=drawn.seed))
        return extended, T

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

        With `batch_sizes` also M, by rescaling the posterior (`Posterior.at_batch_size`): the spread of the draws goes
        with 1 / sqrt(M), so MCBN loses its epistemic uncertainty as training batches grow (Mukhoti et al. 2020,
        arXiv 2012.13220). M acts as a temperature; no training data is needed.

        Args:
            data: DataLoader or Dataset of (x, y) batches, or a tuple (x, y).
            score: regression: "crps" to minimise (as the paper does) or "pll" to maximise; classification: "pll".
            targets: what of a batch is the target, where it is not the second element or a usual key.
            n_samples: use only the first draws.
            ignore_index: classification: a label to leave out, such as the void class of a segmentation.
            batch_sizes: the M to try, each with its best tau; "auto": from 1/16 to 16 times that of the fit. That of
                the fit is always tried, and kept unless another scores better. None: only tau is tuned.
        """
        options: dict[str, Any] = {"targets": targets, "n_samples": n_samples, "ignore_index": ignore_index}
        if batch_sizes is None:
            return super().tune(data, score=score, **options)
        score, network, drawn = self._score(score), self._running(), self.posterior
        tuned, twin = dict[int, noise.Tuned](), copy.copy(self)
        for M in noise.candidates(batch_sizes, drawn.fitted_batch_size or drawn.batch_size):
            twin._set(network, drawn.at_batch_size(M))
            tuned[M] = twin._best_tau(data, score=score, **options)
        M = noise.best(tuned, score)
        self._set(network, drawn.at_batch_size(M))
        self._tau = tuned[M].tau
        return self

    def export(
        self,
        path: str | Path,
        example_x: Any,
        *,
        method: str = "sample",
        n_samples: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        """Write the predictor as one ONNX file that runs without mcbn or torch, for any number of inputs.

        Outputs: mean, variance, epistemic (regression; variance = epistemic + 1/tau), or probs, entropy,
        mutual_information (classification): the numbers of `predict`. `mcbn.export.to_torch_export` gives the same
        as a `torch.export` program.

        Args:
            path: the file; its folder exists.
            example_x: inputs as for `predict`, as many as will come at once: their shape but for N is fixed, their
                number decides how many draws share a pass.
            method: "sample", the draws as constants; "linear", the gradient and the covariance of the draws.
            n_samples: use only the first draws.
            chunk_size: draws in one pass at most; fewer than T make a loop, so that memory does not grow with T.
                Chosen from the size of the example where it is not given.
        """
        export.to_onnx(self, path, example_x, method=method, n_samples=n_samples, chunk_size=chunk_size)

    def __repr__(self) -> str:
        state = repr(self._engine.posterior) if self._engine else "not fitted"
        return f"MCBN({type(unwrap(self.model)).__name__}, {self.task!r}, tau={self.tau}, {state})"
