"""Single inputs: statistics of each alone, exact p-values, combined with entropy, and beside predictions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from deployed import fitted, images, reference, table, trained, watched
from mcbn.field import novelty
from mcbn.field.distance import EPS
from mcbn.field.novelty import class_proportions, class_weights, combined_p_values, see
from test_field_watch import within_binomial


def seen_alone(x: Tensor) -> Tensor:
    """Mean and log variance of what each batch norm of the network of images meets, for one input (1, 3, 12, 12)."""
    net, drawn = trained("images"), fitted("images").posterior
    values, h = [], x.double()
    for name, module in net.double().named_children():
        if isinstance(module, nn.BatchNorm2d):
            values += [h.mean((0, 2, 3)), (h.var((0, 2, 3), correction=0) + EPS).log()]
            mean, var = (s[name].double().mean(0)[:, None, None] for s in (drawn.mean, drawn.var))
            h = (h - mean) / (var + module.eps).sqrt() * module.weight[:, None, None] + module.bias[:, None, None]
        else:
            h = module(h)
    net.float()
    return torch.cat(values)


def test_coordinates_are_those_of_each_input_alone() -> None:
    x, watch = images(5, 3)[0], watched("images")
    seen = see(watch.network, "classification", watch.centre, x).coordinates
    for row, one in zip(seen, x, strict=True):
        torch.testing.assert_close(row, seen_alone(one[None]), rtol=1e-3, atol=1e-3)


def test_tables_are_judged_by_their_activations() -> None:
    x, watch = table(4, 3)[0], watched("table")
    seen = see(watch.network, "classification", watch.centre, x).coordinates
    assert seen.shape == (4, 12 + 10)  # no variances: one value a channel
    torch.testing.assert_close(seen[:, :12], trained("table")[0](x).double().detach(), rtol=1e-5, atol=1e-5)


def test_an_input_is_judged_alone_whatever_comes_with_it() -> None:
    x, watch = images(300, 4)[0], watched("images")
    together = watch.novelty(x)
    torch.testing.assert_close(watch.novelty(x[7:8]).distance, together.distance[7:8], rtol=1e-3, atol=0)
    order = torch.randperm(300)
    torch.testing.assert_close(watch.novelty(x[order]).distance, together.distance[order], rtol=1e-3, atol=0)


def test_large_inputs_go_through_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, watch, sizes = images(10, 4)[0], watched("images"), list[int]()
    whole, run = see(watch.network, "classification", watch.centre, x), watch.network.run_copy
    monkeypatch.setattr(watch.network, "run_copy", lambda inputs: (sizes.append(len(inputs)), run(inputs))[1])
    monkeypatch.setattr(novelty, "BLOCK_VALUES", 4 * x[0].numel())
    few = see(watch.network, "classification", watch.centre, x)
    assert sizes == [4, 4, 2]
    torch.testing.assert_close(few.coordinates, whole.coordinates, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["table", "images"])
def test_clean_inputs_have_uniform_p_values(kind: str) -> None:
    n = 1000
    novelty = watched(kind).novelty((table if kind == "table" else images)(n, 31)[0])
    R = len(watched(kind).input_null.held_out)
    for p_values in (novelty.p_value, novelty.combined):
        for rate in (0.01, 0.1, 0.5):
            bound = 3.3 * math.sqrt(rate * (1 - rate) * (1 / n + 1 / (R + 2)))
            assert abs(float((p_values <= rate).double().mean()) - rate) <= bound


def test_foreign_inputs_are_strange() -> None:
    noise = torch.rand(50, 3, 12, 12)
    assert float((watched("images").novelty(noise).p_value <= 0.01).double().mean()) > 0.9
    assert float((watched("table").novelty(table(50, 3)[0] + 8).p_value <= 0.01).double().mean()) > 0.9


def test_nan_makes_its_own_input_strange_and_no_other() -> None:
    x, watch = images(6, 3)[0].clone(), watched("images")
    clean = watch.novelty(x)
    x[2, 1] = math.nan
    spoiled = watch.novelty(x)
    assert float(spoiled.distance[2]) == math.inf
    assert float(spoiled.p_value[2]) == 1 / (1 + len(watch.input_null.held_out))
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(spoiled.distance[others], clean.distance[others], rtol=1e-3, atol=0)


def naive_combined(score: list[float], held_out: list[list[float]]) -> float:
    """Rank the truncated sum of one input among all R + 1."""
    everything = [[*reference, alone] for reference, alone in zip(held_out, score, strict=True)]
    R = len(held_out[0])

    def p(scores: list[float], i: int) -> float:
        return sum(other >= scores[i] for other in scores) / (R + 1)

    def total(i: int) -> float:
        return max(0.0, math.log(0.05 / p(everything[0], i))) - math.log(p(everything[1], i))

    return sum(total(i) >= total(R) - 1e-12 for i in range(R + 1)) / (R + 1)


def test_combined_p_value_is_the_rank_of_a_truncated_sum() -> None:
    held_out = [torch.rand(99, dtype=torch.float64) for _ in range(2)]
    scores = [torch.rand(30, dtype=torch.float64) * 1.1 for _ in range(2)]
    combined = combined_p_values((scores[0], scores[1]), (held_out[0], held_out[1]))
    lists = [reference.tolist() for reference in held_out]
    expected = [naive_combined([float(s[i]) for s in scores], lists) for i in range(30)]
    assert combined.tolist() == pytest.approx(expected)


def test_combined_p_values_are_exact_though_the_scores_depend() -> None:
    hits = 0
    for _ in range(400):
        first = torch.randn(20, dtype=torch.float64)
        second = first + 0.3 * torch.randn(20, dtype=torch.float64)
        hits += float(combined_p_values((first[:1], second[:1]), (first[1:], second[1:]))) <= 0.1
    assert within_binomial(hits, 400, 0.1)


def test_regression_has_no_entropy_to_combine() -> None:
    watch = fitted("table", "regression").watch(reference("table"), batch_size=8)
    novelty = watch.novelty(table(20, 3)[0])
    assert torch.equal(novelty.combined, novelty.p_value)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_predictions_carry_their_novelty(task: str) -> None:
    bayes, x = fitted("table", task), table(70, 3)[0]
    watch = bayes.watch(reference("table"), batch_size=8)
    alone = watch.novelty(x)
    assert bayes.predict(x).novelty is None
    for data in (x, DataLoader(TensorDataset(x), batch_size=32)):
        prediction = bayes.predict(data, watch=watch)
        torch.testing.assert_close(prediction.novelty.distance, alone.distance, rtol=1e-4, atol=1e-6)
        assert prediction.to("cpu").novelty.p_value.shape == (70,)


def test_rows_that_are_no_inputs_are_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(1, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x.reshape(-1, 1)).reshape(len(x), -1)

    net = Folded()
    net(reference("table"))
    bayes: Any = mcbn.MCBN(net, "regression").fit(reference("table"), n_samples=3, batch_size=8)
    with pytest.raises(mcbn.MCBNError, match=r"layer 'bn' sees .* rows for .* inputs"):
        bayes.watch(reference("table"), batch_size=8).novelty(table(3, 3)[0])


def test_class_proportions_follow_the_expectation_maximisation() -> None:
    probs, reference_probs = torch.rand(30, 3).softmax(1), torch.rand(50, 3).softmax(1)
    prior = reference_probs.double().mean(0).tolist()
    expected = list(prior)
    for _ in range(100):
        shares = [0.0] * 3
        for row in probs.double().tolist():
            joint = [expected[k] / prior[k] * row[k] for k in range(3)]
            shares = [shares[k] + joint[k] / sum(joint) / 30 for k in range(3)]
        expected = shares
    assert class_proportions(probs, reference_probs).tolist() == pytest.approx(expected, rel=1e-9)


def test_proportions_and_weights_undo_a_label_shift() -> None:
    """Probabilities that are right: the estimate finds the proportions, the weights give them to the reference."""
    x = torch.randn(20_000) + 2 * torch.randint(2, (20_000,))
    probs = torch.stack([-(x**2) / 2, -((x - 2) ** 2) / 2], 1).softmax(1)
    shifted = torch.randn(20_000) + 2 * (torch.rand(20_000) < 0.9)
    of_shifted = torch.stack([-(shifted**2) / 2, -((shifted - 2) ** 2) / 2], 1).softmax(1)
    proportions = class_proportions(of_shifted, probs)
    assert proportions.tolist() == pytest.approx([0.1, 0.9], abs=0.02)
    weights = class_weights(probs, proportions)
    assert float(weights @ x.double()) == pytest.approx(1.8, abs=0.05)
    torch.testing.assert_close(class_weights(probs, probs.double().mean(0)), torch.full_like(weights, 1 / 20_000))
