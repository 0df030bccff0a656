"""What every mistake in a call of MCBN is told."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import make
from mcbn import batches


def plain_mlp(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *norm, nn.ReLU(), nn.Linear(6, 2))


class FrozenBatchNorm2d(nn.Module):
    """Called as torchvision's is, in the backbones of its detectors."""


class HandNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(6), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def call(function: Callable[[mcbn.MCBN, Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model, x = make("1d")
        return function(mcbn.MCBN(model, "regression"), x)

    return run


def classify(function: Callable[[mcbn.MCBN, Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model, x = make("1d")
        return function(mcbn.MCBN(model, "classification").fit(x, n_samples=2, batch_size=8), x)

    return run


def fit(b: mcbn.MCBN, x: Tensor, **options: Any) -> mcbn.MCBN:
    return b.fit(x, **{"n_samples": 2, "batch_size": 8, **options})


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: mcbn.MCBN(3, "regression"), "must be a torch.nn.Module, got int"),  # type: ignore[call-overload]
    "wrong task": (lambda: mcbn.MCBN(make("1d")[0], "segmentation"), "task must be one of.*'segmentation'"),
    "no batch norm": (lambda: mcbn.MCBN(plain_mlp(), "regression"), "no normalisation layer of any kind"),
    "frozen batch norm": (
        lambda: mcbn.MCBN(nn.Sequential(FrozenBatchNorm2d()), "regression"),
        r"1 x FrozenBatchNorm2d.*put torch.nn.BatchNorm2d with the same weights and buffers in the place of",
    ),
    "layer norm": (lambda: mcbn.MCBN(plain_mlp(nn.LayerNorm(6)), "regression"), "1 x LayerNorm"),
    "instance norm": (lambda: mcbn.MCBN(HandNormed(), "regression"), "1 x InstanceNorm1d"),
    "uninitialised": (lambda: mcbn.MCBN(nn.LazyBatchNorm1d(), "regression"), "not initialised; run one batch"),
    "no such layer": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=["9"]), r"'9'.*there are \['1', '4'\]"),
    "predicate": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=lambda n, m: False), "matches no batch norm"),
    "no layers": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=[]), "must be None, a positive number"),
    "layers 0": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=0), "must be None, a positive number"),
    "predict first": (call(lambda b, x: b.predict(x)), "not fitted yet; call fit"),
    "sample first": (call(lambda b, x: b.sample(x)), "not fitted yet"),
    "save first": (call(lambda b, x: b.save("x.mcbn")), "not fitted yet"),
    "posterior first": (call(lambda b, x: b.posterior), "not fitted yet"),
    "empty": (call(lambda b, x: fit(b, x[:0])), r"holds 0 example\(s\)"),
    "single": (call(lambda b, x: fit(b, x[:1])), r"holds 1 example\(s\)"),
    "empty loader": (call(lambda b, x: b.fit(DataLoader(TensorDataset(x[:0]), batch_size=4))), r"holds 0 example"),
    "no batch": (call(lambda b, x: b.fit(iter([]))), "no batch at all"),
    "not data": (call(lambda b, x: b.fit(3)), "must be a DataLoader, a Dataset, tensors, arrays or a table; got a int"),
    "n_samples": (call(lambda b, x: fit(b, x, n_samples=0)), "n_samples must be a whole number, at least 1; got 0"),
    "batch_size": (call(lambda b, x: fit(b, x, batch_size=0)), "batch_size must be"),
    "seed": (call(lambda b, x: fit(b, x, seed=-1)), "seed must be"),
    "nan training": (
        call(lambda b, x: fit(b, x.index_fill(0, torch.tensor([1]), torch.nan), batch_size=23)),
        "non-finite",
    ),
    "nan query": (call(lambda b, x: fit(b, x).predict(x * torch.inf)), "non-finite values"),
    "too many draws": (call(lambda b, x: fit(b, x).predict(x, n_samples=3)), "n_samples=3 asked of a posterior of 2"),
    "method": (call(lambda b, x: fit(b, x).predict(x, method="magic")), "method must be .*'magic'"),
    "wrong structure": (call(lambda b, x: fit(b, {"image": x})), "'image': a Tensor.*pass inputs="),
    "wrong width": (call(lambda b, x: fit(b, x[:, :3])), r"shape \(8, 3\).*pass inputs="),
    "ragged": (call(lambda b, x: fit(b, (x, x[:3]))), "share their first axis"),
    "tau": (call(lambda b, x: setattr(b, "tau", -1)), "tau must be a positive number"),
    "tau of text": (call(lambda b, x: setattr(b, "tau", "2")), "tau must be a positive number.*got '2'"),
    "no tau": (call(lambda b, x: setattr(b, "tau", None)), "tau must be a positive number.*got None"),
    "infinite tau of classes": (classify(lambda b, x: setattr(b, "tau", torch.inf)), "1 / temperature; got inf"),
    "tau of each class": (classify(lambda b, x: setattr(b, "tau", [1.0, 2.0])), r"1 / temperature; got \[1.0, 2.0\]"),
    "tau count": (call(lambda b, x: [setattr(b, "tau", torch.ones(3)), fit(b, x).predict(x)]), "tau holds 3 values"),
    "empty prediction": (call(lambda b, x: fit(b, x).predict(DataLoader(TensorDataset(x[:0])))), "gives no batch"),
    "log_prob untuned": (call(lambda b, x: fit(b, x).predict(x).log_prob(x[:, :2])), "needs the noise of the targets"),
    "level": (call(lambda b, x: fit(b, x).predict(x).interval(95)), "level must lie between 0 and 1, got 95"),
    "list of levels": (call(lambda b, x: fit(b, x).predict(x).interval([0.9])), r"between 0 and 1, got \[0.9\]"),
    "save as folder": (call(lambda b, x: fit(b, x).save("..")), r"cannot save .*: it is a folder"),
    "covariance": (call(lambda b, x: fit(b, x).predict(x).covariance), r"predict\(x, covariance=True\)"),
    "target shape": (call(lambda b, x: fit(b, x).tune((x, x))), r"targets of shape \(24, 5\) do not fit"),
    "target nan": (
        call(lambda b, x: fit(b, x).tune((x, x[:, :2] * torch.nan))),
        "48 validation targets are not finite",
    ),
    "no target": (call(lambda b, x: fit(b, x).tune(DataLoader(TensorDataset(x)))), "no targets in"),
    "score": (
        call(lambda b, x: fit(b, x).tune((x, x[:, :2]), score="mse")),
        "score must be .*'pll'., got 'mse'",
    ),
    "one target": (call(lambda b, x: fit(b, x).tune((x[:0], x[:0, :2]))), "at least 2 held-out targets"),
    "no residual": (call(lambda b, x: fit(b, x).tune((x, b.predict(x).mean))), "equal every validation target"),
    "class score": (classify(lambda b, x: b.tune((x, x[:, 0].long()), score="crps")), "score must be one of ..pll.."),
    "label range": (classify(lambda b, x: b.tune((x, torch.full((24,), 2)))), r"labels must lie in 0..1 .*got 2..2"),
    "label negative": (classify(lambda b, x: b.tune((x, torch.full((24,), -1)))), "labels must lie in 0..1"),
    "label shape": (classify(lambda b, x: b.tune((x, torch.zeros(24, 2)))), r"shape \(24,\); got \(24, 2\)"),
    "label fraction": (classify(lambda b, x: b.tune((x, torch.full((24,), 0.5)))), "labels must be whole numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()


def test_batch_of_one_warns_and_fails_only_where_a_layer_sees_one_value() -> None:
    model, x = make("1d")
    with pytest.warns(UserWarning, match="batch_size is 1"), pytest.raises(mcbn.MCBNError, match="one value a channel"):
        mcbn.MCBN(model, "regression").fit(DataLoader(TensorDataset(x), batch_size=1), n_samples=2)
    model, x = make("2d")
    with pytest.warns(UserWarning, match="batch_size is 1"):
        bayes = mcbn.MCBN(model, "regression").fit(DataLoader(TensorDataset(x), batch_size=1), n_samples=4)
    assert (bayes.predict(x).epistemic > 0).any()


def test_diverged_network_is_named() -> None:
    model, x = make("1d")
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    with pytest.raises(mcbn.MCBNError, match="'1' has non-finite statistics"):
        mcbn.MCBN(model, "regression").fit(x * 1e3, n_samples=2, batch_size=8)


def test_uncopyable_network_is_told() -> None:
    model, x = make("1d")
    model.lock = threading.Lock()
    with pytest.raises(mcbn.MCBNError, match="cannot be copied"):
        mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8)


def test_unused_batch_norm_is_told() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.last = nn.BatchNorm1d(5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)

    with pytest.raises(mcbn.MCBNError, match="without a single batch norm call"):
        mcbn.MCBN(Unused(), "regression").fit(torch.randn(9, 5), batch_size=4)


def test_only_values_that_are_not_finite_are_counted_and_refused() -> None:
    large = torch.full((4, 3), 3e38)  # their sum is infinite
    batches.require_finite({"x": large, "labels": torch.zeros(4, dtype=torch.int64)})
    large[1, 2], large[3, 0] = torch.inf, -torch.inf  # the sum is NaN
    with pytest.raises(mcbn.MCBNError, match=r"hold 2 non-finite values .* of shape \(4, 3\)"):
        batches.require_finite({"x": large})
