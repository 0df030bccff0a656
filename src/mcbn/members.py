"""Several networks, each with draws: `mcbn.MCBN([net_a, net_b], task)`."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mcbn import noise, prediction, saving
from mcbn.baselines.predictor import Predictor, of_one_shape
from mcbn.conformal import Calibration
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.posterior import Posterior
from mcbn.prediction import MultilabelPrediction

FORMAT = "mcbn members"


class Members(Predictor):
    """An ensemble whose S members each have T draws of batch-norm statistics, draw t from the same training batch.

    mean = 1/S sum_s mean_s; epistemic = within + between, within = 1/S sum_s epistemic_s, between = 1/S sum_s
    (mean_s - mean)^2: moments over all S T draws. `pred.within` and `pred.between` keep them apart (of classes: those
    of the probabilities). Verbs and arguments are those of `mcbn.MCBN`; n_samples is T of each member, one tau serves
    all, and what is not here is the first member's. Members may differ in all but the shape of their output.

    >>> pred = mcbn.MCBN([bayes.model, bayes.model], "regression").fit(x, n_samples=10, batch_size=16).predict(x)
    >>> bool(torch.allclose(pred.epistemic, pred.within + pred.between)), pred.n_samples
    (True, 20)
    """

    def __init__(self, models: Sequence[nn.Module], task: str, **options: Any) -> None:
        if not models:
            raise MCBNError("give at least one network; got an empty list")
        self.members: list[MCBN[Any]] = []  # while the baseline sets a tau of its own
        super().__init__(task, inputs=options.get("inputs"), outputs=options.get("outputs", "auto"))
        self.members = [MCBN(model, task, **options) for model in models]
        self.noise = self.members[0].noise

    def __getattr__(self, name: str) -> Any:
        if name == "members":  # not made yet, as while being copied
            raise AttributeError(name)
        return getattr(self.members[0], name)

    def fit(self, data: Any, **options: Any) -> Self:
        """Draw the statistics of every member, as `mcbn.MCBN.fit` does."""
        if isinstance(data, Iterator):
            raise MCBNError("the first network would use the iterator up; give a DataLoader, a Dataset or tensors")
        self.members = [copy.copy(member).fit(data, **options) for member in self.members]  # all, or none
        self.inputs, self.n_samples = self.members[0].inputs, self.posterior.n_samples
        return self

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield outputs for prepared inputs, all draws of one member after those of the other."""
        prepared = ((member, member.engine.network.prepare(inputs)) for member in self.members)
        return of_one_shape(chunk for member, own in prepared for chunk in member.draws(own, n_samples))

    def predict(self, x: Any, *, method: str = "sample", watch: Any = None, **options: Any) -> Any:
        """Pool what the members predict; arguments as for `mcbn.MCBN.predict`, the watch that of the first."""

        def predict_batch(inputs: Any) -> Any:
            first, *others = self.members
            own = first.predict(inputs, method=method, watch=watch, **options)
            return pool([own, *(member.predict(inputs, method=method, **options) for member in others)])

        pred: Any = self.engine.network.over(x, predict_batch, prediction.join, self.inputs)
        kept, mean = self.calibration, options.get("mean", "drawn")
        return replace(pred, calibration=kept and kept.for_prediction(method, pred.n_samples, mean))

    def plain_mean(self, x: Any) -> Tensor:
        """Return the average of the members' own means (N, ...) or class probabilities (N, K, ...), without draws."""
        return torch.cat([*of_one_shape(member.plain_mean(x).unsqueeze(0) for member in self.members)]).mean(0)

    def plain(self, x: Any) -> Tensor:
        """Return `plain_mean` as a network gives it, (N, ...): of classes the logarithm."""
        return self.plain_mean(x) if self.task == "regression" else self.plain_mean(x).log()

    def tune(self, data: Any, *, batch_sizes: Any = None, **options: Any) -> Self:
        """Set tau, and with `batch_sizes` one M for all members, as `mcbn.MCBN.tune` does."""
        if batch_sizes is None:
            return super().tune(data, **options)
        score, drawn = noise.require_score(self.task, options.pop("score", None), self.noise), self.posterior
        options["n_samples"] = self._count(options.get("n_samples"))
        sizes = noise.candidates(batch_sizes, drawn.fitted_batch_size or drawn.batch_size)
        twins = {M: self.at_batch_size(M) for M in sizes}
        tuned = {M: noise.tune(twin, data, score=score, **options) for M, twin in twins.items()}
        M = noise.best(tuned, score)
        noise.drop_calibration(self)
        self.members, self.tau = twins[M].members, tuned[M].tau
        noise.warn_if_bound(tuned[M], self.task, M)
        return self

    def at_batch_size(self, M: int) -> Self:
        """Return a twin whose members have the spread of batches of M; this one stays as it is."""
        return self._twin(m.with_posterior(m.posterior.at_batch_size(M)) for m in self.members)

    def adapt(self, unlabelled: Any, *, reference: Any, strength: str | float = "auto") -> Self:
        """Return a twin whose members are all adapted; the reference is data, since a watch belongs to one network."""
        return self._twin(m.adapt(unlabelled, reference=reference, strength=strength) for m in self.members)

    def _twin(self, members: Iterable[MCBN[Any]]) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__ | {"members": [*members]}
        return twin

    def __copy__(self) -> Self:
        return self._twin(map(copy.copy, self.members))

    @property
    def calibration(self) -> Calibration | None:
        """That of the ensemble, which every member keeps, so that whatever changes one of them drops it."""
        return self.members[0].calibration if all(member.calibration for member in self.members) else None

    @calibration.setter
    def calibration(self, value: Calibration | None) -> None:
        for member in self.members:
            member.calibration = value

    @property
    def posterior(self) -> Posterior:
        """The draws of the first member."""
        return self.members[0].posterior

    @posterior.setter
    def posterior(self, value: Posterior) -> None:
        raise MCBNError(f"{len(self.members)} networks have a posterior each; set members[0].posterior and so on")

    @property
    def noise_precision(self) -> Tensor:
        """The tau that all members share."""
        return self.members[0].noise_precision

    @noise_precision.setter
    def noise_precision(self, value: Tensor) -> None:
        for member in self.members:
            member.noise_precision = value

    def to(self, *place: Any, **options: Any) -> Self:
        """Move every member, as `mcbn.MCBN.to` does."""
        self.members = [member.to(*place, **options) for member in self.members]
        return self

    export: Any = MCBN.export  # one file of all members

    def save(self, path: str | Path) -> None:
        """Write posteriors, tau and calibration as one safetensors file."""
        saving.save(path, self.state_dict(), {"format": FORMAT, "task": self.task, "members": str(len(self.members))})

    @classmethod
    def load(cls, path: str | Path, models: Sequence[nn.Module], **options: Any) -> Self:
        """Read what `save` wrote for these networks, in the same order."""
        tensors, text = saving.read_tensors(path)
        if text.get("format") != FORMAT or text["members"] != str(len(models)):
            there = f"{text.get('members', 'one')} network(s)"
            raise MCBNError(f"{path} holds the draws of {there}, but {len(models)} were given; pass the same networks")
        numbered = {name: tensor for name, tensor in tensors.items() if name[0].isdecimal()}
        several = cls(models, text["task"], **options).load_state_dict(numbered)
        if "calibration" in text:  # in files of before, beside the members
            several.calibration = Calibration.unpack(tensors, text)
        return several

    def state_dict(self) -> dict[str, Tensor]:
        """Return the `mcbn.MCBN.state_dict` of every member, its number before each name."""
        return {
            f"{i}.{name}": values for i, one in enumerate(self.members) for name, values in one.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> Self:
        """Take over a `state_dict` made with these networks; what does not fit is an error, and nothing is changed."""
        split: dict[str, dict[str, Tensor]] = {}
        for (number, _, name), tensor in ((key.partition("."), tensor) for key, tensor in state.items()):
            split.setdefault(number, {})[name] = tensor
        if split.keys() != {str(number) for number in range(len(self.members))}:
            raise MCBNError(f"the state_dict is of {len(split)} networks, this ensemble of {len(self.members)}")
        self.members = [m.with_posterior(None).load_state_dict(split[str(i)]) for i, m in enumerate(self.members)]
        self.n_samples = self.posterior.n_samples
        return self

    def __repr__(self) -> str:
        return f"Members({self.members!r})"


def pool(predictions: Sequence[Any]) -> Any:
    """Join predictions for the same inputs by different networks: moments over the draws of all of them."""
    first, S = predictions[0], len(predictions)
    name, spread = ("mean", "epistemic") if hasattr(first, "mean") else ("probs", "variance")
    centres = torch.cat([*of_one_shape(getattr(pred, name).unsqueeze(0) for pred in predictions)])  # (S, N, ...)
    between = centres.var(0, correction=0)
    pooled: dict[str, Any] = {name: centres.mean(0), "between": between}
    pooled[spread] = sum(getattr(pred, spread) for pred in predictions) / S + between
    pooled["n_samples"] = sum(pred.n_samples for pred in predictions)
    pooled["samples"] = None if first.samples is None else torch.cat([pred.samples for pred in predictions])
    if name == "probs":
        both = torch.stack([centres, 1 - centres], 2) if isinstance(first, MultilabelPrediction) else centres
        within = sum(pred.mutual_information for pred in predictions) / S
        return replace(first, **pooled, mutual_information=within + prediction.mutual_information(both))
    if first.epistemic_covariance is not None:
        offsets = (centres - centres.mean(0)).flatten(2)  # (S, N, D)
        covariance = sum(p.epistemic_covariance for p in predictions) / S
        pooled["epistemic_covariance"] = covariance + torch.einsum("sni,snj->nij", offsets, offsets) / S
    for name in ("head_variance", "shift"):
        if getattr(first, name) is not None:
            pooled[name] = sum(getattr(pred, name) for pred in predictions) / S
    again = None if first.draws is None else lambda: (chunk for pred in predictions for chunk in pred.draws())
    return replace(first, draws=again, **pooled)
