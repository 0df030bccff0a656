"""Cross-validation of all configurations that share a batch size, as one stacked program with early stopping.

Symbols: B splits, F folds, C configurations; S = B F C networks. Two criteria each: the validation RMSE of the mean
over T draws ("mc") and of the plain network ("plain"). Protocol: Teye et al. 2018, Section 4.3, and published code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcbn_study.regression.evaluation import Evaluator, Moments, rmse
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.stack import Family, Values
from mcbn_study.regression.train import Networks, Trainer

CRITERIA = ("mc", "plain")
SHRINK = 0.75  # the stack is rebuilt once so small a part of it is still in training


@dataclass(frozen=True)
class Configuration:
    """One point of the grid; rate is None in the BN family."""

    weight_decay: float
    batch_size: int
    rate: float | None = None


@dataclass(frozen=True)
class Rules:
    """When validation happens and when training ends, counted in epochs and evaluations."""

    evaluate_every: int = 20
    patience: int = 10
    max_epochs: int = 2000
    search_samples: int = 500
    n_samples: int = 500
    tf32: bool = False
    compiled: bool = False
    fused: bool = False

    @property
    def numerics(self) -> dict[str, bool]:
        """Return how to compute, as an evaluator takes it; a trainer takes `fused` too."""
        return {"tf32": self.tf32, "compiled": self.compiled}


@dataclass
class Search:
    """What cross-validation found: best mean RMSE over folds and its epoch, and each split's best networks.

    rmse, epoch (2, B, C) per criterion; stopped (B, C): the last epoch trained; winner (2, B) the best configuration;
    values: parameters of the winners' fold networks, each (2, B, F, ...); mean, variance, y (2, B, F, n) of their
    validation rows in original units, NaN beyond a fold's own.
    """

    rmse: Tensor
    epoch: Tensor
    stopped: Tensor
    winner: Tensor
    values: Values
    mean: Tensor
    variance: Tensor
    y: Tensor


class _Best:
    """The best evaluation of each (split, configuration) by one criterion, and the parameters it had."""

    def __init__(self, shape: tuple[int, int], values: Values) -> None:
        device = values["weights"].device
        self.rmse = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
        self.epoch = torch.zeros(shape, dtype=torch.int64, device=device)
        self.waited = torch.zeros(shape, dtype=torch.int64, device=device)
        self.values = {name: value.clone() for name, value in values.items()}

    def update(self, scores: Tensor, epoch: int, running: Tensor) -> Tensor:
        """Enter the mean RMSE of an evaluation, (B, C); return where it is a new best."""
        better = (scores < self.rmse) & running  # NaN is never better
        self.rmse = torch.where(better, scores, self.rmse)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.waited = torch.where(better, 0, self.waited + running.long())
        return better


class CrossValidation:
    """Trains B F C networks. Streams of the problem are ordered by split, then fold.

    `winner` names the configuration of each split beforehand; otherwise the lowest RMSE decides.
    """

    def __init__(
        self,
        problem: Problem,
        n_folds: int,
        configurations: list[Configuration],
        rules: Rules,
        *,
        hidden: int,
        family: Family,
        winner: Sequence[int] | None = None,
    ) -> None:
        self._winner = winner
        self.problem, self.configurations, self.rules = problem, configurations, rules
        self.F, self.B, self.C = n_folds, len(problem.streams) // n_folds, len(configurations)
        wanted = networks_of(problem, configurations, family, hidden)
        order = torch.argsort((problem.train.n.cpu() // wanted.batch_size)[wanted.stream], stable=True)
        self.ids = order  # the place of each trained network in (B, F, C)
        self.trainer = Trainer(problem, wanted[order], **rules.numerics, fused=rules.fused)
        self.best = {name: _Best((self.B, self.C), self.trainer.values) for name in CRITERIA}
        self.running = torch.ones(self.B, self.C, dtype=torch.bool, device=problem.device)
        self.stopped = torch.full((self.B, self.C), rules.max_epochs)
        self._present = torch.arange(len(order), device=problem.device)  # of the trainer's, in the whole stack
        self._all = self.trainer.networks
        ids = order.to(problem.device)
        self._split, self._configuration = ids // (self.F * self.C), ids % self.C

    def run(self, on_evaluation: Callable[[int], object] = lambda epoch: None) -> Search:
        """Train until every configuration has stopped; `on_evaluation(epoch)` may keep the `state`."""
        rules = self.rules
        evaluator = Evaluator(self.problem, self._all.batch_size, rules.search_samples, **rules.numerics)
        while bool(self.running.any()) and self.trainer.epoch + rules.evaluate_every <= rules.max_epochs:
            self._shrink()
            self.trainer.advance(rules.evaluate_every)
            self._evaluate(evaluator, self.trainer.epoch)
            on_evaluation(self.trainer.epoch)
        return self._result()

    def state(self) -> dict[str, Tensor]:
        """Return everything the search goes on from after an evaluation."""
        state = {f"trainer.{name}": value for name, value in self.trainer.state().items()}
        state |= {"present": self._present, "running": self.running, "stopped": self.stopped}
        for criterion, best in self.best.items():
            parts = {"rmse": best.rmse, "epoch": best.epoch, "waited": best.waited}
            parts |= {f"value.{name}": value for name, value in best.values.items()}
            state |= {f"best.{criterion}.{name}": value for name, value in parts.items()}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same search."""
        device = self.problem.device
        self._present, self.running = state["present"].to(device), state["running"].to(device)
        self.stopped = state["stopped"]
        self.trainer.restore(_under(state, "trainer."), self._present)
        for criterion, best in self.best.items():
            own = {name: value.to(device) for name, value in _under(state, f"best.{criterion}.").items()}
            best.rmse, best.epoch, best.waited = own["rmse"], own["epoch"], own["waited"]
            best.values = _under(own, "value.")

    def _evaluate(self, evaluator: Evaluator, epoch: int) -> None:
        local = torch.nonzero(self._is_running()).flatten()  # places in the trainer
        places = self._present[local]  # in the whole stack
        networks = self.trainer.networks[local]
        values = {name: value[local] for name, value in self.trainer.values.items()}
        predictions = {"mc": evaluator.moments(values, networks).mean, "plain": evaluator.plain(values, networks)}
        for name, prediction in predictions.items():
            scores = self._mean_over_folds(rmse(prediction, self.problem, networks.stream), places)
            better = self.best[name].update(scores, epoch, self.running)
            chosen = better[self._split[places], self._configuration[places]]  # (networks,)
            for parameter, kept in self.best[name].values.items():
                kept[places[chosen]] = values[parameter][chosen]
        waiting = torch.stack([best.waited >= self.rules.patience for best in self.best.values()]).all(0)
        self.stopped[(self.running & waiting).cpu()] = epoch
        self.running &= ~waiting

    def _mean_over_folds(self, scores: Tensor, places: Tensor) -> Tensor:
        at = self._split[places] * self.C + self._configuration[places]
        total = scores.new_zeros(self.B * self.C).index_add_(0, at, scores)
        return (total / self.F).view(self.B, self.C)

    def _is_running(self) -> Tensor:
        return self.running[self._split[self._present], self._configuration[self._present]]

    def _shrink(self) -> None:
        running = torch.nonzero(self._is_running()).flatten()
        if len(running) <= SHRINK * len(self._present):
            self.trainer.keep(running)
            self._present = self._present[running]

    def _result(self) -> Search:
        """Gather the scores, and evaluate the best networks of each split and criterion with all T draws."""
        winner = torch.stack([self.best[name].rmse.argmin(1) for name in CRITERIA])  # (2, B)
        if self._winner is not None:
            winner = torch.tensor([self._winner] * len(CRITERIA), device=self.problem.device)
        places = torch.stack([self._places(row) for row in winner])  # (2, B, F)
        values = {
            parameter: torch.stack([self.best[c].values[parameter][places[i]] for i, c in enumerate(CRITERIA)])
            for parameter in self.trainer.values
        }
        moments, y = zip(*(self._validate(name, places[i]) for i, name in enumerate(CRITERIA)), strict=True)
        return Search(
            torch.stack([self.best[name].rmse for name in CRITERIA]).cpu(),
            torch.stack([self.best[name].epoch for name in CRITERIA]).cpu(),
            self.stopped,
            winner.cpu(),
            {parameter: value.cpu() for parameter, value in values.items()},
            torch.stack([part.mean for part in moments]).cpu(),
            torch.stack([part.variance for part in moments]).cpu(),
            torch.stack(y).cpu(),
        )

    def _places(self, winner: Tensor) -> Tensor:
        """Find the fold networks of each split's configuration (B,) in the stack: (B, F)."""
        place_of = torch.empty(len(self.ids), dtype=torch.int64, device=self.problem.device)
        place_of[self.ids.to(self.problem.device)] = torch.arange(len(self.ids), device=self.problem.device)
        return place_of.view(self.B, self.F, self.C).gather(2, winner[:, None, None].expand(-1, self.F, 1)).squeeze(2)

    def _validate(self, criterion: str, places: Tensor) -> tuple[Moments, Tensor]:
        """Return moments and targets of the validation rows, (B, F, n) in original units."""
        index = places.flatten()
        networks = self._all[index]
        values = {name: value[index] for name, value in self.best[criterion].values.items()}
        evaluator = Evaluator(self.problem, networks.batch_size, self.rules.n_samples, **self.rules.numerics)
        if criterion == "mc":
            moments = evaluator.moments(values, networks)
        else:
            mean = evaluator.plain(values, networks).double()
            moments = Moments(mean, torch.zeros_like(mean))
        moments = original_units(moments, self.problem, networks.stream)
        y = self.problem.query.y[networks.stream].double()
        y = original_units(Moments(y, y), self.problem, networks.stream).mean
        shape = (self.B, self.F, -1)
        return Moments(moments.mean.view(shape), moments.variance.view(shape)), y.view(shape)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def networks_of(problem: Problem, configurations: list[Configuration], family: Family, hidden: int) -> Networks:
    """List every configuration for every stream, stream first. All share one batch size.

    A batch size above the smallest training part means that part: published code.
    """
    R, C = len(problem.streams), len(configurations)
    size = min(configurations[0].batch_size, int(problem.train.n.min()))
    weight_decay = torch.tensor([c.weight_decay for c in configurations]).repeat(R)
    rate = torch.tensor([c.rate or 0.0 for c in configurations]).repeat(R)
    return Networks(family, torch.arange(R).repeat_interleave(C), weight_decay, rate, size, hidden)


def original_units(moments: Moments, problem: Problem, stream: Tensor) -> Moments:
    """Undo the scaling of the target, (S, n); rows that are padding become NaN."""
    mean, std = problem.y_mean[stream, None], problem.y_std[stream, None]
    padding = ~problem.query.mask[stream]
    return Moments(
        (moments.mean * std + mean).masked_fill(padding, torch.nan),
        (moments.variance * std.square()).masked_fill(padding, torch.nan),
    )
