"""Networks of any signature: what goes in, what comes out, what is looked through."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mcbn
from mcbn.batches import pick_inputs
from mcbn.network import Network, pick_output, snapshot


class Pair(nn.Module):
    """Takes two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.bn(left) * right


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.bn(batch["left"]) * batch["right"]


class Point(NamedTuple):
    out: Tensor
    aux: Tensor


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.bn, self.kind = nn.BatchNorm1d(4), kind

    def forward(self, x: Tensor) -> Any:
        y = self.bn(x)
        results = {
            "tuple": (x, y),
            "single": (y,),
            "out": {"aux": x, "out": y},
            "logits": {"logits": y},
            "other": {"z": y},
        }
        return {**results, "named": Point(y, x)}[self.kind]


A = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
B = torch.rand(60, 4, generator=torch.Generator().manual_seed(1))
LOADERS: dict[str, tuple[Any, Any]] = {
    "nested tuple": (DataLoader([((a, b), 0.0) for a, b in zip(A, B, strict=True)], batch_size=20), None),
    "dict by name": (
        DataLoader([{"left": a, "right": b, "y": 1} for a, b in zip(A, B, strict=True)], batch_size=20),
        None,
    ),
    "indices": (DataLoader([(a, b, 0.0) for a, b in zip(A, B, strict=True)], batch_size=20), [0, 1]),
    "keys": (
        DataLoader([{"left": a, "z": 0, "right": b} for a, b in zip(A, B, strict=True)], batch_size=20),
        ["left", "right"],
    ),
    "function": (
        DataLoader([{"p": a, "q": b} for a, b in zip(A, B, strict=True)], batch_size=20),
        lambda d: (d["p"], d["q"]),
    ),
    "tensors": (((A, B), torch.zeros(60)), None),
    "arrays": (((A.numpy(), B.numpy()), np.zeros(60)), None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_inputs_of_every_structure_reach_the_network(name: str) -> None:
    data, inputs = LOADERS[name]
    bayes = mcbn.MCBN(Pair(), "regression").fit(data, n_samples=4, batch_size=20, inputs=inputs)
    reference = mcbn.MCBN(Pair(), "regression").fit((A, B), n_samples=4, batch_size=20, inputs=lambda batch: batch)
    torch.testing.assert_close(bayes.sample((A, B)), reference.sample((A, B)))
    torch.testing.assert_close(bayes.sample({"left": A, "right": B}), reference.sample((A, B)))
    if isinstance(data, DataLoader):
        torch.testing.assert_close(bayes.predict(data).mean, reference.predict((A, B)).mean)


def test_network_that_takes_a_dict_whole() -> None:
    bayes = mcbn.MCBN(TakesDict(), "regression").fit({"left": A, "right": B}, n_samples=4, batch_size=20)
    reference = mcbn.MCBN(Pair(), "regression").fit((A, B), n_samples=4, batch_size=20, inputs=[0, 1])
    torch.testing.assert_close(bayes.sample({"left": A, "right": B}), reference.sample((A, B)))


def test_structure_the_network_cannot_take_says_what_came_and_how_to_pick() -> None:
    loader = DataLoader([{"p": a, "q": b} for a, b in zip(A, B, strict=True)], batch_size=20)
    with pytest.raises(mcbn.MCBNError, match=r"(?s)'p': a Tensor of shape \(20, 4\) \(float32\).*pass inputs="):
        mcbn.MCBN(Pair(), "regression").fit(loader)
    with pytest.raises(mcbn.MCBNError, match="inputs='nope' is not in a dict"):
        mcbn.MCBN(Pair(), "regression").fit(loader, inputs="nope")
    with pytest.raises(mcbn.MCBNError, match="empty tuple"):
        pick_inputs((), None, ([], []))


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("tuple", 1),
        ("tuple", lambda result: result[1]),
        ("single", None),
        ("out", None),
        ("out", "out"),
        ("logits", None),
        ("other", "z"),
        ("named", None),
        ("named", "out"),
    ],
)
def test_outputs_of_every_structure_are_found(kind: str, output: Any) -> None:
    bayes = mcbn.MCBN(Returns(kind), "regression", output=output).fit(A, n_samples=3, batch_size=20)
    reference = mcbn.MCBN(nn.BatchNorm1d(4), "regression").fit(A, n_samples=3, batch_size=20)
    assert torch.equal(bayes.sample(A), reference.sample(A))


@pytest.mark.parametrize(("result", "output"), [((A, B), None), ({"z": A}, None), ((A, B), 5), (A, "out"), (3, None)])
def test_output_that_cannot_be_found_says_what_came(result: Any, output: Any) -> None:
    with pytest.raises(mcbn.MCBNError, match=r"the network returned .*pass output="):
        pick_output(result, output)


def test_boxes_of_a_detector_need_a_function() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"of a detector, a function that gives as many numbers in every draw"):
        pick_output([{"boxes": A, "scores": B}, {"boxes": A[:1], "scores": B[:1]}])


def test_targets_of_a_dict_are_found_by_usual_names_or_by_targets() -> None:
    bayes = mcbn.MCBN(nn.BatchNorm1d(4), "regression").fit(A, n_samples=9, batch_size=20)
    tau = bayes.tune((A, A + B)).tau
    for key, targets in (("y", None), ("labels", None), ("z", "z")):
        loader = DataLoader([{"input": a, key: t} for a, t in zip(A, A + B, strict=True)], batch_size=60)
        torch.testing.assert_close(bayes.tune(loader, targets=targets).tau, tau)
    with pytest.raises(mcbn.MCBNError, match="not a tensor"):
        bayes.tune({"input": A, "z": "text"}, targets="z")


def test_object_with_its_own_to_goes_to_the_network_whole() -> None:
    class Graph:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, device: Any) -> "Graph":
            return Graph(self.x.to(device))

    class OnGraph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, graph: Graph) -> Tensor:
            return self.bn(graph.x)

    bayes = mcbn.MCBN(OnGraph(), "regression")
    loader = DataLoader(list(A), batch_size=20, collate_fn=lambda rows: Graph(torch.stack(rows)))
    assert bayes.fit(loader, n_samples=3).predict(Graph(A)).mean.shape == (60, 4)


def test_floating_inputs_take_the_networks_dtype() -> None:
    bayes = mcbn.MCBN(nn.BatchNorm1d(4), "regression").fit(A.double(), n_samples=3, batch_size=20)
    assert bayes.predict(A.double().numpy()).mean.dtype == torch.float32


def test_snapshot_shares_nothing_and_is_in_eval_throughout() -> None:
    class Stubborn(nn.Sequential):
        def train(self, mode: bool = True) -> "Stubborn":
            super().train(mode)
            self[1].training = True
            return self

    model = Stubborn(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    frozen, _ = snapshot(model)
    assert not any(module.training for module in frozen.modules())
    assert not any(p.requires_grad for p in frozen.parameters())
    theirs = {t.data_ptr() for t in model.state_dict().values()}
    assert not theirs & {t.data_ptr() for t in frozen.state_dict().values()}


def test_network_with_weight_norm_and_loose_tensors_can_be_copied() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model[1].cached = model[0](A).sum()  # a result with a graph: deepcopy alone refuses it
    expected = model.eval()(A)
    assert torch.equal(Network(model)(A), expected)


def test_network_without_tensors_runs_where_its_inputs_are() -> None:
    model = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    assert Network(model).device is None
    assert mcbn.MCBN(model, "regression").fit(A, n_samples=3, batch_size=20).predict(A).mean.shape == (60, 4)
