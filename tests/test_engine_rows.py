"""Whether inputs influence each other is read off the operators of a pass: blocks never change a number."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mcbn
from drawn import check_equal, fit, loop
from mcbn import linear
from mcbn.engine import constants, plan as plans
from mcbn.engine.rows import are_independent
from mcbn.export import to_torch_export


def shifted(change: Any) -> Any:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        h = net.bn(net.first(x))
        change(net, h, x)
        return net.last(h)

    return run


def before(change: Any) -> Any:
    return lambda net, x: net.last(torch.relu(net.bn(net.first(change(net, x)))))


def behind(change: Any) -> Any:
    return lambda net, x: net.last(change(net, net.bn(net.first(x))))


def with_row_in_front(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net.last.bias.expand(len(x), 2), x[:, :4]], 1)


def attention(net: nn.Module, x: Tensor) -> Tensor:
    q = x.view(-1, 2, 3)
    return net.attention(q, q, q, need_weights=False)[0].flatten(1)


APART = {
    "as it is": before(lambda net, x: x),
    "normalised rows": before(lambda net, x: F.normalize(x, dim=1)),
    "softmax of a row": before(lambda net, x: x.softmax(1)),
    "sorted row": before(lambda net, x: x.sort(1).values),
    "spread of a row": behind(lambda net, h: h / h.std(1, keepdim=True)),
    "layer norm": behind(lambda net, h: F.layer_norm(h, (6,))),
    "instance norm": before(lambda net, x: F.instance_norm(x.view(len(x), 2, 3)).flatten(1)),
    "group norm": behind(lambda net, h: F.group_norm(h, 2)),
    "columns joined": before(lambda net, x: torch.cat([x[:, 1:], x[:, :1]], 1)),
    "a row in front": before(with_row_in_front),
    "repeated weights": before(lambda net, x: torch.cat([net.last.bias.repeat(len(x), 1), x[:, :4]], 1)),
    "attention": before(attention),
    "convolution": before(lambda net, x: F.conv1d(x[:, None], net.last.weight[:, None, :3], padding=1).mean(1)),
    "time first": before(lambda net, x: F.linear(x.view(-1, 2, 3).transpose(0, 1), torch.eye(3, dtype=x.dtype))
                         .transpose(0, 1).reshape(-1, 6)),
    "weights first": lambda net, x: net.last(net.bn((net.first.weight @ x.T).T)),
    "einsum": behind(lambda net, h: torch.einsum("ni,oi->no", h, net.first.weight)),
    "in place": before(lambda net, x: x.clone().mul_(2).add_(1)),
    "columns assigned": shifted(lambda net, h, x: h[:, :2].copy_(x[:, :2])),
    "threshold": before(lambda net, x: torch.where(x > 100, x / 255, x)),
}  # fmt: skip
MEET = {
    "rescaled pixels": before(lambda net, x: torch.where(x.max() > 1.5, x / 255, x)),
    "any": before(lambda net, x: torch.where((x > 1.5).any(), x / 255, x)),
    "clipped by norm": before(lambda net, x: x * (2 / x.norm()).clamp(max=1)),
    "clipped by norm behind": behind(lambda net, h: h * (200 / h.norm()).clamp(max=1)),
    "rescaled by the largest": before(lambda net, x: x / x.abs().max().clamp(min=1)),
    "centred": before(lambda net, x: x - x.mean(0)),
    "centred in place": before(lambda net, x: x.clone().sub_(x.mean())),
    "centred through a view": shifted(lambda net, h, x: h[:, :2].add_(x.mean())),
    "row assigned": shifted(lambda net, h, x: h[0].fill_(0)),
    "first row taken away": before(lambda net, x: x - x[0]),
    "sorted": before(lambda net, x: x.sort(0).values),
    "summed up": before(lambda net, x: x.cumsum(0)),
    "reversed": before(lambda net, x: x.flip(0)),
    "rolled": before(lambda net, x: x.roll(1)),
    "softmax of a column": behind(lambda net, h: h.softmax(0)),
    "neighbours": before(lambda net, x: (x @ x.T).softmax(1) @ x),
    "rows mixed by a view": before(lambda net, x: x.reshape(6, -1).T.reshape(-1, 6)),
    "time first": before(lambda net, x: x.view(-1, 2, 3).transpose(0, 1).reshape(-1, 6)),
    "numbered": before(lambda net, x: x + torch.arange(len(x), dtype=x.dtype)[:, None]),
    "number of inputs": before(lambda net, x: x / len(x)),
    "number of inputs in a tensor": before(lambda net, x: x * torch.tensor(1.0 / len(x), dtype=x.dtype)),
    "path by number": before(lambda net, x: x - x.mean() if len(x) > 20 else x),
    "quantile": before(lambda net, x: x.clamp(max=x.quantile(0.9))),
    "attention over the batch": before(lambda net, x: F.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0]),
    "best of all": before(lambda net, x: x * (x >= x.topk(3, 0).values[-1:])),
    "pairs": behind(lambda net, h: h - (h[:, None] - h[None]).abs().mean(1)),
}


class Written(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.last, self.run = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), run
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def fitted(run: Any) -> tuple[mcbn.MCBN[Any], Tensor]:
    x = torch.rand(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return fit(Written(run).double(), x), x


def later(x: Tensor) -> list[Tensor]:
    return [x, torch.cat([x[:25], 255 * x[25:]]), -3 * x, torch.cat([5 + x[:25], x[25:]])]


@pytest.mark.parametrize("name", APART)
def test_networks_that_treat_inputs_one_by_one_are_told(name: str) -> None:
    bayes, x = fitted(APART[name])
    assert are_independent(bayes.engine.network, bayes.posterior.draw(0), x, x[:20], x[20:])


@pytest.mark.parametrize("name", MEET)
def test_inputs_that_meet_are_never_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CPU_BLOCK", 60)
    bayes, x = fitted(MEET[name])
    assert not are_independent(bayes.engine.network, bayes.posterior.draw(0), x, x[:20], x[20:])
    bayes.sample(x, chunk_size=2)
    for q in later(x):
        check_equal(bayes.sample(q, chunk_size=2), loop(bayes, q), 1e-12)
        assert "blocks" not in bayes.explain(q, chunk_size=2)


def test_inputs_that_do_not_meet_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CPU_BLOCK", 60)
    for name in ("as it is", "attention", "in place"):
        bayes, x = fitted(APART[name])
        assert "50 inputs in " in bayes.explain(x)
        for q in later(x):
            check_equal(bayes.sample(q, chunk_size=2), loop(bayes, q), 1e-12)


@pytest.mark.parametrize("name", ["centred", "rescaled pixels", "clipped by norm", "as it is"])
def test_linear_is_the_same_in_one_block_and_in_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted((APART | MEET)[name])
    for q in later(x):
        whole = bayes.predict(q, method="linear")
        with monkeypatch.context() as patch:
            patch.setattr(linear, "BLOCK_VALUES", 100)
            cut = bayes.predict(q, method="linear")
        check_equal(cut.mean, whole.mean, 1e-10)
        check_equal(cut.epistemic, whole.epistemic, 1e-8)


def test_outputs_that_meet_on_later_inputs_have_no_gradient_each() -> None:
    bayes, x = fitted(MEET["clipped by norm behind"])
    for _ in range(3):
        bayes.predict(x, method="linear")  # not clipped
    with pytest.raises(mcbn.MCBNError, match="depends on inputs beside its own"):
        bayes.predict(255 * x, method="linear")


@pytest.mark.parametrize("name", ["rescaled pixels", "centred", "clipped by norm behind"])
def test_memory_that_runs_out_does_not_cut_inputs_that_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted(MEET[name])
    bayes.sample(x, chunk_size=2)

    def scarce(self: plans.Plan, inputs: Any, buffers: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plans.Plan, "prepare", scarce)
    with pytest.raises(mcbn.MCBNError, match=r"treats each of them by itself, so they are not cut .*out of memory"):
        bayes.sample(x, chunk_size=2)


@pytest.mark.parametrize("factor", [torch.tensor([1.0, 3.0]), torch.tensor(3.0)])
def test_memory_that_runs_out_does_not_cut_what_all_inputs_share(
    factor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bn = nn.Linear(2, 6), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return self.bn(self.first(x * factor))

    bayes = mcbn.MCBN(
        Scaled().eval(), "regression", inputs=lambda q: q if isinstance(q, dict) else {"x": q, "factor": factor}
    )
    bayes.fit(torch.randn(48, 2), n_samples=4, batch_size=8)
    run = Scaled.forward

    def scarce(self: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        if len(x) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, x, factor)

    monkeypatch.setattr(Scaled, "forward", scarce)
    with pytest.raises(mcbn.MCBNError, match="treats each of them by itself, so they are not cut"):
        bayes.sample({"x": torch.randn(36, 2), "factor": factor})


@pytest.mark.parametrize("name", ["rescaled pixels", "centred", "as it is"])
def test_an_exported_graph_keeps_inputs_of_different_draws_apart(name: str) -> None:
    bayes, x = fitted((APART | MEET)[name])
    program = to_torch_export(bayes, x[:4]).module()
    for q in later(x):
        found, expected = program(q), bayes.predict(q)
        check_equal(found["mean"], expected.mean, 1e-8)
        check_equal(found["variance"], expected.variance, 1e-8)
    if name != "as it is":
        for options in ({"method": "linear"}, {"chunk_size": 5}):
            with pytest.raises(mcbn.MCBNError, match="nothing shows that this network treats each input by itself"):
                to_torch_export(bayes, x[:4], **options)
