import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import mcbn  # noqa: E402
from mcbn.lightning import MCBNCallback  # noqa: E402
from mcbn.prediction import ClassificationPrediction, RegressionPrediction  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's advice on loaders
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self, outputs=1, fails=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise RuntimeError("broken")
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        if y.is_floating_point():
            return nn.functional.mse_loss(self(x)[:, 0], y)
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, _):
        self.log("loss", self.training_step(batch, _))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def loaders(classes=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, generator=generator)
    y = x.sum(1) + 0.3 * torch.randn(96, generator=generator)
    rows = TensorDataset(x, (y > 0).long() if classes else y)
    train, held = torch.utils.data.Subset(rows, range(64)), torch.utils.data.Subset(rows, range(64, 96))
    return DataLoader(train, 16, shuffle=True, drop_last=True), DataLoader(held, 16)


def trainer(*callbacks, epochs=5):
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


def fitted(task="regression", **options):
    pl.seed_everything(0, verbose=False)
    train, held = loaders(task == "classification")
    module, callback = Module(1 if task == "regression" else 2), MCBNCallback(task, n_samples=20, **options)
    run = trainer(callback)
    run.fit(module, train, held)
    return module, callback, run, train, held


@pytest.mark.parametrize(
    ("task", "kind"), [("regression", RegressionPrediction), ("classification", ClassificationPrediction)]
)
def test_fit_then_predict_equals_mcbn_by_hand(task, kind):
    module, callback, run, train, held = fitted(task)
    by_hand = mcbn.MCBN(module, task).fit(train, n_samples=20).tune(held)
    assert callback.bayes.tau == by_hand.tau
    assert callback.bayes.posterior.batch_size == 16
    predictions = run.predict(module, held)
    assert [type(prediction) for prediction in predictions] == [kind, kind]
    for prediction, (x, _) in zip(predictions, held, strict=True):
        expected = by_hand.predict(x)
        name = "mean" if task == "regression" else "probs"
        torch.testing.assert_close(getattr(prediction, name), getattr(expected, name))
        torch.testing.assert_close(prediction.variance, expected.variance)


def test_the_module_is_as_it_was():
    module, _, run, _, held = fitted()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run.predict(module, held)
    assert "predict_step" not in vars(module)
    torch.testing.assert_close(dict(module.state_dict()), before)
    plain = trainer().predict(module, held.dataset[0][0][None, None])
    assert isinstance(plain[0], torch.Tensor)


def test_predict_step_is_put_back_after_an_exception():
    module, callback, run, _, held = fitted()
    callback.of_predict = {"method": "nothing"}
    with pytest.raises(mcbn.MCBNError, match="method"):
        run.predict(module, held)
    assert "predict_step" not in vars(module)


def test_a_predict_step_set_on_the_instance_is_put_back():
    module, _, run, _, held = fitted()
    step = module.predict_step
    module.predict_step = step
    run.predict(module, held)
    assert vars(module)["predict_step"] is step


def test_predict_options_are_passed_on_and_tuning_can_be_left_out():
    module, callback, run, _, held = fitted(tune=False, predict={"method": "linear"})
    assert callback.bayes.tau == float("inf")
    expected = callback.bayes.predict(next(iter(held))[0], method="linear")
    torch.testing.assert_close(run.predict(module, held)[0].epistemic, expected.epistemic)


def test_fit_works_without_validation_data():
    pl.seed_everything(0, verbose=False)
    callback = MCBNCallback("regression", n_samples=5)
    run = trainer(callback, epochs=2)
    module = Module()
    module.validation_step = None
    run.fit(module, loaders()[0])
    assert callback.bayes.posterior.n_samples == 5
    assert callback.bayes.tau == float("inf")


def test_predict_before_fit_is_refused():
    with pytest.raises(mcbn.MCBNError, match="has not been fitted"):
        trainer(MCBNCallback("regression")).predict(Module(), loaders()[1])


def test_a_lightning_module_goes_into_mcbn_directly():
    train, held = loaders()
    pl.seed_everything(0, verbose=False)
    module = Module()
    trainer(epochs=3).fit(module, train, held)  # leaves a trainer attached, which must not be copied
    bayes = mcbn.MCBN(module, "regression").fit(train, n_samples=10).tune(held)
    x = held.dataset.dataset.tensors[0]
    inner = mcbn.MCBN(module.net, "regression").fit(train, n_samples=10).tune(held)
    torch.testing.assert_close(bayes.predict(x).mean, inner.predict(x).mean)
    torch.testing.assert_close(bayes.predict(x).variance, inner.predict(x).variance)
    assert list(bayes.posterior.layers) == ["net.1"]
