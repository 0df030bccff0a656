"""Watching batches and streams: exact p-values, the distance by its equation, bounds on false alarms, bad input."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mcbn
from deployed import M, blurred, cnn, faded, fitted, images, reference, table, trained, watched
from mcbn.algorithm import record
from mcbn.field import distance as metrics, watch as watching
from mcbn.field.distance import fit_metric, fit_null, layer_scores, pooled_p_value, rank_p_values
from mcbn.field.reference import Reference
from mcbn.field.watch import Martingale, Watch, needed_batches
from snippets import blocks
from untouched import untouched


def within_binomial(count: int, n: int, rate: float, sigmas: float = 3.3) -> bool:
    return abs(count - n * rate) <= sigmas * math.sqrt(n * rate * (1 - rate)) + 1


def gaussian_rows(n: int, seed: int, P: int = 8) -> Tensor:
    """Rows with a covariance of full rank, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(P, P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.randn(n, P, dtype=torch.float64, generator=generator) @ mixing


# The distance and its ranks


@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("K", [3, 8])
def test_distance_is_its_equation(K: int, ridge: float) -> None:
    z, new = gaussian_rows(60, 1), gaussian_rows(5, 2)
    location, scale = z.mean(0), z.std(0)
    u = ((z - location) / scale).numpy()
    values, vectors = np.linalg.eigh(u.T @ u / (len(z) - 1))
    values, vectors = values[::-1], vectors[:, ::-1]
    added = ridge * np.mean(values[:K])
    for row, D in zip(new, fit_metric(z, directions=K, ridge=ridge)(new), strict=True):
        c = vectors.T @ ((row - location) / scale).numpy()
        expected = sum(c[k] ** 2 / (values[k] + added) for k in range(K))
        if K < 8:
            expected += sum(c[K:] ** 2) / (np.mean(values[K:]) + added)
        assert float(D) == pytest.approx(expected, rel=1e-8)


def test_coordinates_are_means_and_log_variances_of_a_training_pass() -> None:
    x = images(M, 3)[0]
    expected = []
    for mean, var in record(trained("images"), x):
        expected += [mean.double(), (var.double() + metrics.EPS).log()]
    z = watched("images").coordinates(x)
    torch.testing.assert_close(z[0], torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["table", "images"])
def test_batches_in_one_pass_have_the_statistics_of_each_alone(kind: str) -> None:
    x, watch = (table if kind == "table" else images)(10 * M, 3)[0], watched(kind)
    together = watch.all_coordinates(iter(x.split(M)))
    alone = torch.cat([watch.coordinates(batch) for batch in x.split(M)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_a_network_that_mixes_its_rows_is_recorded_batch_by_batch() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x - x.mean(0) + x.amax(0))

    net, x = Mixing(), reference("table")
    for batch in x.split(M):
        net(batch)
    watch = mcbn.MCBN(net, "regression").fit(x, n_samples=3, batch_size=M).watch(x, batch_size=M)
    alone = torch.cat([watch.coordinates(batch) for batch in x[: 6 * M].split(M)])
    torch.testing.assert_close(watch.all_coordinates(iter(x[: 6 * M].split(M))), alone, rtol=1e-5, atol=1e-5)


def test_p_value_is_one_plus_the_larger_ones_over_one_plus_all() -> None:
    held_out = torch.tensor([1.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    for D in (0.0, 1.0, 1.5, 2.0, 3.0, 5.0, 9.0, math.inf):
        expected = (1 + sum(float(d) >= D for d in held_out)) / 5
        assert float(rank_p_values(torch.tensor([D], dtype=torch.float64), held_out)) == pytest.approx(expected)


def test_p_values_are_uniform_over_references() -> None:
    """Every time another reference: P(p <= k / (R + 1)) = k / (R + 1), here R = 19."""
    n, p_values, layers = 600, [], []
    for number in range(n):
        rows = gaussian_rows(40 + 19 + 1, 100 + number).exp()  # far from Gaussian
        null = fit_null(rows[:40], rows[40:59], {"a": 1, "b": 3})
        p_values.append(float(rank_p_values(null.metric(rows[59:]), null.held_out)))
        layers.append(float(null.layers(rows[59:], {"a": 1, "b": 3}).min()))
    for k in (1, 2, 5, 10, 15):
        assert within_binomial(sum(p <= k / 20 + 1e-9 for p in p_values), n, k / 20)
        assert within_binomial(sum(p <= k / 20 + 1e-9 for p in layers), n, k / 20)  # any layer at all


def test_pooled_p_values_are_exact_and_find_what_single_ones_do_not() -> None:
    n, generator = 400, torch.Generator().manual_seed(0)
    draws = torch.rand(n, 40 + 5, dtype=torch.float64, generator=generator)
    clean = [pooled_p_value(row[:5], row[5:], seed=i, rounds=99) for i, row in enumerate(draws)]
    assert within_binomial(sum(p <= 0.05 for p in clean), n, 0.05)
    assert within_binomial(sum(p <= 0.3 for p in clean), n, 0.3)
    assert pooled_p_value(torch.full((6,), 0.95), torch.linspace(0, 1, 100)) < 0.01  # each has p = 0.06


@pytest.mark.parametrize(("kind", "size"), [("table", 2), ("table", 8), ("table", 20), ("images", 1), ("images", 8)])
def test_false_alarms_at_every_batch_size(kind: str, size: int) -> None:
    """Of one reference the share is a Beta variable; with the binomial on top the variance is a(1-a)(1/n + 1/(R+2))."""
    watch, draw, n = watched(kind), table if kind == "table" else images, 150
    x = draw(n * size, 17)[0]
    p_values = torch.tensor([watch(x[i * size : (i + 1) * size]).p_value for i in range(n)])
    R = len(watch.null(size).held_out)
    for rate in (0.05, 0.2, 0.5):
        bound = 3.3 * math.sqrt(rate * (1 - rate) * (1 / n + 1 / (R + 2))) + 1 / R
        assert abs(float((p_values <= rate).float().mean()) - rate) <= bound


def test_spread_of_means_goes_with_one_over_m_but_log_variances_do_not() -> None:
    """Why every size has a null of its own."""
    watch = watched("table")
    small, large = watch.null(2).metric, watch.null(20).metric
    means, log_variances = slice(0, 12), slice(12, 24)  # of the first layer
    ratio = (small.scale[means] / large.scale[means]).mean() / math.sqrt(20 / 2)
    assert float(ratio) == pytest.approx(1, abs=0.1)
    moved = (large.location - small.location)[log_variances] / large.scale[log_variances]
    assert float(moved.mean()) > 3  # E log sigma^2_B grows with M
    assert float((small.scale[log_variances] / large.scale[log_variances]).mean()) > 1.3 * math.sqrt(20 / 2)


def test_held_out_batches_share_no_input_and_none_was_fitted_on() -> None:
    x = torch.arange(3000.0).reshape(-1, 1).expand(-1, 5)
    inputs = Reference(x, fitted("table").network, None, seed=3)
    fitting = {int(v) for batch in inputs.overlapping(8, 400) for v in batch[:, 0]}
    held_out = [int(v) for batch in inputs.disjoint(8, 10_000) for v in batch[:, 0]]
    assert len(held_out) == len(set(held_out)) == 2248
    assert not fitting & set(held_out)


def test_runs_of_neighbours_stay_together() -> None:
    x = torch.arange(3000.0).reshape(-1, 1).expand(-1, 5)
    inputs = Reference(x, fitted("table").network, None, run=5, seed=3)
    for batch in [*inputs.overlapping(10, 5), *inputs.disjoint(10, 5)]:
        first, second = batch[:5, 0], batch[5:, 0]
        assert torch.equal(first - first[0], torch.arange(5.0))
        assert torch.equal(second - second[0], torch.arange(5.0))


# Readings


@pytest.mark.parametrize("shift", [blurred, faded])
def test_shifted_images_are_seen(shift: Any) -> None:
    x = images(20 * M, 5)[0]
    readings = [watched("images")(shift(x[i * M : (i + 1) * M])) for i in range(20)]
    assert np.mean([reading.shifted for reading in readings]) > 0.5


def test_explain_says_where_and_how_much() -> None:
    reading = watched("images")(3 * images(M, 5)[0])
    assert reading.kind == "inputs"
    assert reading.explain().startswith("from layer 1 on")
    assert "times wider than in the reference" in reading.explain()
    assert reading.layers[0].width == pytest.approx(3, rel=0.2)  # the first convolution has no bias
    assert [layer.layer for layer in reading.layers] == ["1", "4"]


def test_layer_reading_is_its_definition() -> None:
    x, watch = images(M, 6)[0], watched("images")
    metric, z, reading = watch.null(M).metric, watch.coordinates(x)[0], watch(x)
    C, moved = 8, z - metric.location
    assert reading.layers[0].distance == pytest.approx(float((moved / metric.scale)[: 2 * C].square().mean()))
    std = (metric.location[C : 2 * C] / 2).exp()
    assert reading.layers[0].offset == pytest.approx(float((moved[:C] / std).square().mean().sqrt()))
    assert reading.layers[0].width == pytest.approx(float((moved[C : 2 * C].median() / 2).exp()))
    last = [*watch.channels.values()][-1]
    assert reading.layers[-1].distance == pytest.approx(float((moved / metric.scale)[-2 * last :].square().mean()))
    std, mean = (metric.location[-last:] / 2).exp(), moved[-2 * last : -last]
    assert reading.layers[-1].offset == pytest.approx(float((mean / std).square().mean().sqrt()))
    assert float(layer_scores(metric.standardize(z[None]), watch.channels)[0, 0].exp()) == pytest.approx(
        reading.layers[0].distance
    )


def test_clean_batch_is_explained_as_such() -> None:
    reading = next(r for r in (watched("images")(images(M, seed)[0]) for seed in range(40, 60)) if not r.shifted)
    assert reading.explain().startswith(("no shift", "other classes"))
    assert reading.class_p_value is None or reading.class_p_value > 0.01


def test_a_batch_of_one_class_is_told_from_a_shift() -> None:
    x = images(30 * M, 8, classes=(0,))[0]
    kinds = [watched("images")(x[i * M : (i + 1) * M]).kind for i in range(30)]
    assert kinds.count("inputs") <= 3
    reading = next(r for r in (watched("images")(x[i * M : (i + 1) * M]) for i in range(30)) if r.kind == "classes")
    assert not reading.shifted
    assert reading.p_value <= 0.01
    assert "other classes, same inputs" in reading.explain()
    assert watched("images")(faded(x[:M])).shifted


def test_nan_is_an_alarm_of_its_own_kind() -> None:
    watch = watched("images")
    x = images(M, 5)[0].clone()
    x[3, 0, 0, 0] = math.nan
    reading = watch(x)
    assert reading.shifted
    assert reading.kind == "not finite"
    assert reading.distance == math.inf
    assert reading.p_value == 1 / (1 + len(watch.null(M).held_out))
    assert "NaN" in reading.explain()
    watch.reset()
    evidence = watch.update(torch.cat([x, images(M, 6)[0]]))
    assert (evidence.n_batches, evidence.not_finite) == (2, 1)


def test_same_seed_same_watch_and_nothing_of_the_users_changes() -> None:
    bayes, x = fitted("table"), table(M, 5)[0]
    with untouched(trained("table")):
        one, same, other = (bayes.watch(reference("table"), batch_size=M, seed=seed) for seed in (1, 1, 2))
        assert one(x).distance == same(x).distance != other(x).distance
        one.update(x)
        one.novelty(x)


# Streams


def naive_value(p_values: list[float]) -> float:
    """S_t as a sum over the times at which betting begins."""
    t, value = len(p_values), 1 / (len(p_values) + 1)
    for bet in watching.BETS:
        for start in range(1, t + 1):
            gains = [bet * p ** (bet - 1) for p in p_values[start - 1 :]]
            value += math.prod(gains) / (start * (start + 1)) / len(watching.BETS)
    return value


def test_evidence_is_the_sum_over_all_times_to_begin() -> None:
    stream, p_values = Martingale(torch.rand(50, dtype=torch.float64), 0), []
    for distance in torch.rand(12, dtype=torch.float64).tolist():
        p_values.append(stream.rank(distance))
        stream.bet(p_values[-1])
        assert math.exp(stream.log_value) == pytest.approx(naive_value(p_values), rel=1e-9)


def test_p_values_of_a_stream_are_uniform_and_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BAG", 25)  # the bag is full almost from the start
    generator, p_values = torch.Generator().manual_seed(0), []
    for seed in range(300):
        stream = Martingale(torch.rand(19, dtype=torch.float64, generator=generator), seed)
        p_values.append([stream.rank(float(d)) for d in torch.rand(20, dtype=torch.float64, generator=generator)])
        assert len(stream.bag) == 25
    table_of_p = np.array(p_values)
    for rate in (0.05, 0.3, 0.7):
        assert within_binomial(int((table_of_p <= rate).sum()), table_of_p.size, rate)
    correlation = np.corrcoef(table_of_p.T)[np.triu_indices(20, 1)]
    assert abs(correlation.mean()) < 4 / math.sqrt(300 * len(correlation))
    assert np.abs(correlation).max() < 5 / math.sqrt(300)


def test_clean_streams_alarm_no_more_often_than_promised() -> None:
    """Ville: S ever reaches 1 / alpha with probability at most alpha; here alpha = 0.1, 300 streams of 400 batches."""
    generator, n, alarms = torch.Generator().manual_seed(0), 300, 0
    for seed in range(n):
        stream = Martingale(torch.rand(99, dtype=torch.float64, generator=generator), seed)
        for distance in torch.rand(400, dtype=torch.float64, generator=generator).tolist():
            stream.bet(stream.rank(distance))
        alarms += stream.highest >= math.log(10)
    assert alarms <= 0.1 * n + 3.3 * math.sqrt(0.1 * 0.9 * n)


def test_value_of_a_stream_has_mean_one() -> None:
    """A martingale: bets on uniform p-values win nothing on average."""
    p = (np.arange(100_000) + 0.5) / 100_000
    for bet in watching.BETS:
        expected = 1 - 0.5 * (1e-5) ** bet  # what the first cell of the sum misses at most
        assert np.mean(bet * p ** (bet - 1)) == pytest.approx(1, abs=2 * abs(1 - expected) + 1e-3)


def test_stream_alarms_soon_after_a_shift_and_keeps_the_alarm() -> None:
    watch = fitted("images").watch(reference("images"), batch_size=M)
    evidence = watch.update(images(30 * M, 21)[0])
    assert not evidence.shifted
    assert evidence.n_batches == 30
    evidence = watch.update(faded(images(15 * M, 22)[0]))
    assert evidence.shifted
    assert evidence.value > evidence.limit == pytest.approx(100)
    assert watch.update(images(M, 23)[0]).shifted
    watch.reset()
    assert watch.evidence == watching.Evidence(1.0, 100.0, False, 0, None, 0, 0)


def test_a_stream_of_any_pieces_is_the_same_stream() -> None:
    x = images(5 * M + 3, 24)[0]
    results = []
    for sizes in ([len(x)], [1] * len(x), [M + 1, 2, len(x) - M - 3]):
        watch = watched("images")
        watch.reset()
        for part in torch.split(x, sizes):
            evidence = watch.update(part)
        results.append(evidence)
    assert results[0] == results[1] == results[2]
    assert results[0].waiting == 3
    assert results[0].n_batches == 5


# Keeping


def test_a_loaded_watch_goes_on_where_it_was(tmp_path: Path) -> None:
    bayes, x = fitted("images"), images(3 * M, 25)[0]
    watch = bayes.watch(reference("images"), batch_size=M)
    watch.update(x)
    watch.save(tmp_path / "watch.safetensors")
    loaded = Watch.load(tmp_path / "watch.safetensors", bayes)
    assert loaded(x[:M]).p_value == watch(x[:M]).p_value
    assert loaded(x[:M]).layers == watch(x[:M]).layers
    assert torch.equal(loaded.novelty(x).combined, watch.novelty(x).combined)
    new = images(3 * M + 2, 26)[0]
    assert loaded.update(new) == watch.update(new)
    with pytest.raises(mcbn.MCBNError, match=r"nothing for batches of 5: loaded without its reference.*\[8\]"):
        loaded(x[:5])
    whole = Watch.load(tmp_path / "watch.safetensors", bayes, reference=reference("images"))
    assert whole(x[:5]).distance == watch(x[:5]).distance


def test_the_last_nulls_are_kept_and_a_refused_size_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "NULLS_KEPT", 2)
    watch, x = fitted("table").watch(reference("table"), batch_size=M), table(500, 27)[0]
    for size in (M, 4):
        watch(x[:size])
    with pytest.raises(mcbn.MCBNError, match="held-out batches"):
        watch(x)
    assert sorted(watch.nulls) == [4, M]
    watch(x[:3])
    assert sorted(watch.nulls) == [3, M]  # the size of streams stays


@pytest.mark.parametrize("kind", ["table", "images"])
def test_a_used_watch_can_be_pickled_and_copied(kind: str) -> None:
    x = (table if kind == "table" else images)(3 * M + 2, 25)[0]
    watch = fitted(kind).watch(reference(kind), batch_size=M)
    watch.update(x)
    watch.novelty(x)
    for twin in (pickle.loads(pickle.dumps(watch)), copy.deepcopy(watch)):
        assert twin.evidence == watch.evidence
        assert twin(x[:M]).p_value == watch(x[:M]).p_value
        assert twin(x[:5]).distance == pytest.approx(watch(x[:5]).distance, rel=1e-4)  # its reference is there


def test_a_watch_of_another_network_is_refused(tmp_path: Path) -> None:
    path, x = tmp_path / "watch.safetensors", table(600, 1)[0]
    watched("table").save(path)
    with pytest.raises(mcbn.MCBNError, match="another network"):
        Watch.load(path, fitted("images"))
    other = mcbn.MCBN(trained("table"), "classification", layers=1).fit(x, n_samples=3, batch_size=8)
    with pytest.raises(mcbn.MCBNError, match="watch is of layers"):
        Watch.load(path, other)
    with pytest.raises(mcbn.MCBNError, match=r"bayes.watch\(reference\)"):
        other.predict(x[:3], watch=watched("table"))
    net = copy.deepcopy(trained("table"))
    with torch.no_grad():
        net[6].bias += 1
    with pytest.raises(mcbn.MCBNError, match="other weights"):
        Watch.load(path, mcbn.MCBN(net, "classification").fit(x, n_samples=3, batch_size=8))
    alike, again = (mcbn.MCBN(n, "classification").fit(x, n_samples=3, batch_size=8) for n in (net, trained("table")))
    with pytest.raises(mcbn.MCBNError, match="other weights"):
        alike.predict(x[:3], watch=watched("table"))
    with pytest.raises(mcbn.MCBNError, match="other weights"):
        alike.adapt(x[:30] + 5, reference=watched("table"))
    watch = pickle.loads(pickle.dumps(watched("table")))
    for _ in range(2):
        assert torch.equal(again.predict(x[:3], watch=watch).novelty.p_value, watch.novelty(x[:3]).p_value)
    assert again.adapt(x[:30] + 5, reference=watch).adaptation.moved
    fitted("table").save(path)
    with pytest.raises(mcbn.MCBNError, match="not an mcbn watch"):
        Watch.load(path, fitted("table"))


def test_a_damaged_watch_is_named(tmp_path: Path) -> None:
    from mcbn.saving import read_tensors, write_tensors

    path = tmp_path / "watch.safetensors"
    watched("table").save(path)
    tensors, metadata = read_tensors(path)
    del tensors["null.8.metric.spread"]
    write_tensors(path, tensors, metadata)
    with pytest.raises(mcbn.MCBNError, match=r"is damaged: .*'null.8.metric.spread'"):
        Watch.load(path, fitted("table"))


# Bad input


def test_a_reference_too_small_says_how_much_it_takes() -> None:
    with pytest.raises(
        mcbn.MCBNError, match=r"0.01 takes 99 held-out batches.* reference of 1056 inputs; it has 500.* at most 3"
    ):
        fitted("table").watch(reference("table")[:500], batch_size=8)
    with pytest.raises(mcbn.MCBNError, match=r"it has 100: give more, or a larger false_alarms"):  # not "batches of 0"
        fitted("table").watch(reference("table")[:100])
    assert fitted("table").watch(reference("table")[:500]).batch_size == 3  # chosen by the reference
    assert fitted("table").watch(reference("table")[:500], batch_size=8, false_alarms=0.05).batch_size == 8
    assert [needed_batches(rate) for rate in (0.5, 0.05, 0.01, 0.001)] == [1, 19, 99, 999]


@pytest.mark.parametrize("false_alarms", [0, 1, -0.1, math.nan, "a"])
def test_impossible_rates_are_refused(false_alarms: Any) -> None:
    with pytest.raises(mcbn.MCBNError, match="false_alarms must lie between 0 and 1"):
        fitted("table").watch(reference("table"), false_alarms=false_alarms)


def test_a_file_is_no_watch_before_it_is_loaded() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"watch must be made by bayes.watch\(reference\) or loaded, got a str"):
        fitted("table").predict(reference("table"), watch="home.watch")


def test_inputs_of_another_shape_are_refused() -> None:
    watch = watched("images")
    for call in (watch, watch.update, watch.novelty):
        with pytest.raises(mcbn.MCBNError, match=r"\(3, 16, 16\).*\(3, 12, 12\)"):
            call(torch.zeros(M, 3, 16, 16))
    with pytest.raises(mcbn.MCBNError, match="loop over the loader"):
        watch(DataLoader(TensorDataset(images(M, 1)[0])))
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        fitted("images").watch(reference("table"))


@pytest.mark.parametrize(("value", "says"), [(math.nan, "non-finite values"), (1e30, "statistics on the reference")])
def test_a_reference_that_is_not_finite_is_refused(value: float, says: str) -> None:
    x = reference("images").clone()
    x[::7, 0, 0, 0] = value
    with pytest.raises(mcbn.MCBNError, match=says):
        fitted("images").watch(x, batch_size=M)(images(M, 1)[0])


def test_one_input_of_a_table_has_no_statistics() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"layer '1' sees one value a channel.*novelty"):
        watched("table")(table(1, 1)[0])


def test_an_unfitted_network_cannot_be_watched() -> None:
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        mcbn.MCBN(cnn(), "classification").watch(reference("images"))


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((5,), float(index)) + torch.randn(5)


def test_random_transforms_of_a_reference_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="training augmentation") as caught:
        fitted("table").watch(Augmented(), false_alarms=0.05)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("data", ["loader", "dataset", "iterable", "pairs"])
def test_references_of_any_kind_are_alike(data: str) -> None:
    x, y = table(600, 2)
    kinds: dict[str, Any] = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        "dataset": TensorDataset(x, y),
        "iterable": ((x[i : i + 50], y[i : i + 50]) for i in range(0, 600, 50)),
        "pairs": (x, y),
    }
    watch = fitted("table").watch(kinds[data], batch_size=4, false_alarms=0.05)
    same = fitted("table").watch(x, batch_size=4, false_alarms=0.05)
    assert watch(x[:4]).distance == pytest.approx(same(x[:4]).distance, rel=1e-5)
    assert "batch_size=4" in repr(watch)


def test_regression_and_a_choice_of_layers_are_watched() -> None:
    bayes = mcbn.MCBN(trained("table"), "regression", layers=["4"]).fit(table(600, 1)[0], n_samples=4, batch_size=8)
    watch = bayes.watch(reference("table"), batch_size=M)
    assert list(watch.channels) == ["4"]
    assert watch(table(M, 3)[0] + 20).shifted


def test_networks_with_one_layer_called_twice_are_watched() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.bn = nn.Linear(5, 6), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.b(self.bn(self.a(x)).relu()))

    net = Twice()
    net(reference("table"))
    bayes = mcbn.MCBN(net, "regression").fit(reference("table"), n_samples=3, batch_size=16)
    reading = bayes.watch(reference("table"), batch_size=M)(table(M, 3)[0])
    assert [layer.layer for layer in reading.layers] == ["bn", "bn#2"]


def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks("field.md")[0], {"__name__": "snippet"})
    assert "moved by 200 inputs" in capsys.readouterr().out


def test_a_watch_says_what_it_watches() -> None:
    assert repr(watched("images")) == f"Watch(2 layers, batch_size={M}, false_alarms=0.01)"
