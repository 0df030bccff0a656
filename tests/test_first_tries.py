"""Data as a newcomer gives them: each kind works, or the first sentence of the message names the cure."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import settle
from mcbn.errors import MissingExtraError


def table_network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    return settle(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), x), x


def image_network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(40, 3, 7, 9)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(140, 3))
    return settle(body, x), x


def rows(task: str = "regression") -> tuple[mcbn.MCBN[Any], Tensor]:
    network, x = table_network()
    return mcbn.MCBN(network, task), x


def fitted_rows(task: str = "regression") -> tuple[mcbn.MCBN[Any], Tensor]:
    bayes, x = rows(task)
    return bayes.fit(x, n_samples=4, batch_size=8), x


def images() -> tuple[mcbn.MCBN[Any], Tensor]:
    network, x = image_network()
    return mcbn.MCBN(network, "classification"), x


def fitted_images() -> tuple[mcbn.MCBN[Any], Tensor]:
    bayes, x = images()
    return bayes.fit(x, n_samples=4, batch_size=8), x


def frame(x: Tensor) -> pd.DataFrame:
    return pd.DataFrame(x.numpy(), columns=list("abcde"))


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.epistemic, other.epistemic)


FITS: dict[str, Callable[[Tensor], Any]] = {
    "array of double precision": lambda x: x.double().numpy(),
    "read-only array": lambda x: np.broadcast_to(x.numpy(), x.shape),
    "DataFrame": frame,
    "DataFrame and Series": lambda x: (frame(x), pd.Series(np.zeros(40))),
    "list of arrays": lambda x: list(x.numpy()),
    "list of tensors": list,
    "list of batches": lambda x: list(x.split(8)),
    "list of pairs of batches": lambda x: [(b, torch.zeros(len(b))) for b in x.split(8)],
    "list of batches of arrays": lambda x: [b.numpy() for b in x.split(8)],
}


@pytest.mark.parametrize("name", FITS)
def test_training_data_of_every_kind_give_the_draws_of_their_tensor(name: str) -> None:
    (bayes, x), (expected, _) = rows(), fitted_rows()
    size = {} if "batches" in name else {"batch_size": 8}
    close(bayes.fit(FITS[name](x), n_samples=4, **size).predict(x), expected.predict(x))


@pytest.mark.parametrize("name", FITS)
def test_inputs_of_every_kind_give_the_prediction_of_their_tensor(name: str) -> None:
    bayes, x = fitted_rows()
    given = FITS[name](x)
    close(bayes.predict(given[0] if isinstance(given, tuple) else given), bayes.predict(x))


def test_a_list_of_pictures_is_a_batch_of_them() -> None:
    bayes, x = fitted_images()
    torch.testing.assert_close(bayes.predict(list(x)).probs, bayes.predict(x).probs)
    torch.testing.assert_close(bayes.predict(list(x.split(16))).probs, bayes.predict(x).probs)


def test_tables_tune() -> None:
    bayes, x = fitted_rows()
    y = torch.randn(40, 2)
    tau = bayes.tune((x, y)).tau
    torch.testing.assert_close(bayes.tune((frame(x), pd.DataFrame(y.numpy()))).tau, tau)
    torch.testing.assert_close(bayes.tune((x, y.tolist())).tau, tau)


def test_columns_of_a_table_are_taken_by_name() -> None:
    bayes, x = rows()
    bayes.fit(frame(x), n_samples=4, batch_size=8)
    expected = bayes.predict(x)
    for other in (frame(x)[list("edcba")], frame(x).assign(city="Bonn")[["city", *"cabed"]]):
        close(bayes.predict(other), expected)
        torch.testing.assert_close(bayes.tune((other, x[:, :2])).tau, bayes.tune((x, x[:, :2])).tau)
        assert str(bayes.check(other)) == str(bayes.check((x, x[:, 0]))) == str(bayes.check((other, x[:, 0])))
        for data in (other, (other, x[:, 0])):
            home, watch = (bayes.watch(table, batch_size=2, false_alarms=0.1) for table in (x, data))
            assert watch(other[:3]).distance == home(x[:3]).distance
            assert watch.update(other) == home.update(x)
            assert torch.equal(watch.novelty(other).distance, home.novelty(x).distance)
            assert [*watch.read([other])] == [*home.read([x])]
        moved = (bayes.adapt(table, reference=home, strength=1).posterior.mean["1"] for table in (x, other))
        assert torch.equal(*moved)
    with pytest.raises(
        mcbn.MCBNError, match=r"give the columns of the fit: the table lacks \['c'\], it has \['a', 'b'"
    ):
        bayes.predict(frame(x).drop(columns="c"))
    bayes.fit((frame(x), x[:, 0]), n_samples=4, batch_size=8)
    close(bayes.predict(frame(x)[list("edcba")]), bayes.predict(x))


def test_tables_of_several_kinds_of_numbers_are_numbers() -> None:
    bayes, x = fitted_rows()
    mixed = frame(x).assign(a=lambda t: t.a > 0, b=lambda t: t.b.round().astype("Int64"))
    numbers = x.clone()
    numbers[:, 0], numbers[:, 1] = (x[:, 0] > 0).float(), x[:, 1].round()
    close(bayes.predict(mixed), bayes.predict(numbers))
    mixed.loc[3, "b"] = pd.NA
    with pytest.raises(mcbn.MCBNError, match="the inputs hold 1 non-finite values"):
        bayes.predict(mixed)


def test_targets_of_a_table_are_scored() -> None:
    bayes, x = fitted_rows()
    bayes.tau, y = 2.0, x[:, :2]
    torch.testing.assert_close(bayes.predict(x).log_prob(pd.DataFrame(y.numpy())), bayes.predict(x).log_prob(y))
    classifier, _ = fitted_rows("classification")
    labels = (x[:, 0] > 0).long()
    expected = classifier.predict(x).log_prob(labels)
    torch.testing.assert_close(classifier.predict(x).log_prob(pd.Series(labels.numpy())), expected)


def test_batches_one_by_one_are_predicted_and_tuned_on() -> None:
    bayes, x = fitted_rows()
    close(bayes.predict(iter(x.split(8))), bayes.predict(x))
    y = torch.randn(40, 2)
    pairs = list(zip(x.split(8), y.split(8), strict=True))
    torch.testing.assert_close(bayes.tune(pairs).tau, bayes.tune((x, y)).tau)
    torch.testing.assert_close(bayes.tune(pairs, score="pll").tau, bayes.tune((x, y), score="pll").tau)


SCALE = "turn whole numbers into floats scaled as in training, such as x / 255 for images"
Try = tuple[Callable[[], tuple[mcbn.MCBN[Any], Tensor]], Callable[[mcbn.MCBN[Any], Tensor], Any], str]
MISTAKES: dict[str, Try] = {
    "one row": (fitted_rows, lambda b, x: b.predict(x[0]), "add the axis of inputs, x[None]: Sequential"),
    "one array": (fitted_rows, lambda b, x: b.predict(x[0].numpy()), "add the axis of inputs, x[None]: Sequential"),
    "one Series": (fitted_rows, lambda b, x: b.predict(frame(x).iloc[0]), "add the axis of inputs, x[None]: "),
    "a list of numbers": (fitted_rows, lambda b, x: b.predict(x[0].tolist()), "add the axis of inputs, x[None]: "),
    "one picture": (fitted_images, lambda b, x: b.predict(x[0]), "add the axis of inputs, x[None]: Sequential"),
    "one HWC picture": (
        fitted_images,
        lambda b, x: b.predict(x[0].permute(1, 2, 0)),
        "add the axis of inputs and put channels first, x.permute(2, 0, 1)[None]: ",
    ),
    "HWC pictures": (
        fitted_images,
        lambda b, x: b.predict(x.permute(0, 2, 3, 1)),
        "put channels before height and width, x.permute(0, 3, 1, 2): Sequential",
    ),
    "fit on HWC pictures": (
        images,
        lambda b, x: b.fit(x.permute(0, 2, 3, 1), batch_size=8),
        "put channels before height and width, x.permute(0, 3, 1, 2): Sequential",
    ),
    "uint8 pictures": (fitted_images, lambda b, x: b.predict((255 * x).byte()), f"{SCALE}: Sequential could not"),
    "fit on uint8 pictures": (images, lambda b, x: b.fit((255 * x).byte(), batch_size=8), f"{SCALE}: Sequential"),
    "uint8 HWC pictures": (
        fitted_images,
        lambda b, x: b.predict((255 * x).byte().permute(0, 2, 3, 1).numpy()),
        f"{SCALE} and put channels before height and width, x.permute(0, 3, 1, 2): ",
    ),
    "one uint8 HWC picture": (
        fitted_images,
        lambda b, x: b.predict((255 * x[0]).byte().permute(1, 2, 0).numpy()),
        f"{SCALE} and add the axis of inputs and put channels first, x.permute(2, 0, 1)[None]: ",
    ),
    "whole numbers": (fitted_rows, lambda b, x: b.predict((10 * x).long()), f"{SCALE}: Sequential could not run"),
    "rows and columns exchanged": (fitted_rows, lambda b, x: b.predict(x.T), "put inputs on the first axis, x.T: "),
    "inputs with their targets": (
        fitted_rows,
        lambda b, x: b.predict((x, x[:, 0])),
        "give the inputs alone, without the targets: Sequential",
    ),
    "text in a table": (
        rows,
        lambda b, x: b.fit(frame(x).assign(city="Bonn"), batch_size=8),
        "encode text as numbers first: columns ['city'] are object",
    ),
    "an array of objects": (
        fitted_rows,
        lambda b, x: b.predict(x.numpy().astype(object)),
        "encode text as numbers first: values are object",
    ),
    "missing values": (
        fitted_rows,
        lambda b, x: b.predict(frame(x).where(frame(x) > 0)),
        "the inputs hold 100 non-finite values (NaN or infinity) in a tensor of shape (40, 5); clean or impute them",
    ),
    "a path": (fitted_rows, lambda b, x: b.predict("test.csv"), "give a tensor of numbers, made as in training: "),
    "a list of paths": (fitted_rows, lambda b, x: b.predict(["a.png", "b.png"]), "give a tensor of numbers, made as"),
    "pictures of several sizes": (
        fitted_images,
        lambda b, x: b.predict([x[0], x[1, :, :5]]),
        "give tensors of one shape, made as in training; got a list",
    ),
    "a column too few": (
        fitted_rows,
        lambda b, x: b.predict(x[:, :4]),
        "Sequential could not run on what it was given",
    ),
    "labels as text": (
        lambda: fitted_rows("classification"),
        lambda b, x: b.tune((x, ["cat", "dog"] * 20)),
        "give targets as numbers, such as sorted(set(y)).index of each label: ",
    ),
    "labels one-hot": (
        lambda: fitted_rows("classification"),
        lambda b, x: b.tune((x, torch.eye(2)[torch.zeros(40, dtype=torch.long)])),
        "pass y.argmax(1): labels must be whole numbers of shape (40,); got (40, 2)",
    ),
    "several labels an input": (
        lambda: fitted_rows("classification"),
        lambda b, x: b.tune((x, (x[:, :2] > 0).long())),
        'take task="multilabel": labels must be whole numbers of shape (40,); got (40, 2)',
    ),
    "targets of one output of two": (
        fitted_rows,
        lambda b, x: b.tune((x, x[:, 0])),
        "targets of shape (40,) do not fit predictions of shape (40, 2); give one an output",
    ),
    "a generator that is used up": (
        rows,
        lambda b, x: b.fit(iter([])),
        "the training data gives no batch at all; give it afresh",
    ),
    "a dict nobody takes": (
        rows,
        lambda b, x: b.fit(DataLoader([{"image": row} for row in x], batch_size=8)),
        "pass inputs='image': Sequential could not run",
    ),
    "a number": (rows, lambda b, x: b.fit(3), "data must be a DataLoader, a Dataset, tensors, arrays or a table"),
    "no examples in a batch": (
        rows,
        lambda b, x: b.fit(DataLoader(TensorDataset(x), batch_size=8), batch_size=0),
        "batch_size must be a whole number, at least 1; got 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_words_name_the_cure(name: str) -> None:
    start, mistake, words = MISTAKES[name]
    bayes, x = start()
    with pytest.raises(mcbn.MCBNError) as told:
        mistake(bayes, x)
    assert str(told.value).startswith(words)


@pytest.mark.parametrize("module", ["mcbn.lightning", "mcbn.torchmetrics", "mcbn.sklearn"])
def test_a_missing_extra_is_an_import_error_too(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"mcbn.sklearn": "sklearn"}.get(module, module.split(".")[1])
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mcbn\[") as told:
        importlib.import_module(module)
    assert isinstance(told.value, ImportError)
    assert isinstance(told.value, mcbn.MCBNError)
