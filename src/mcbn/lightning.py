"""MCBN under Lightning: a callback that fits after training and predicts with uncertainty in `Trainer.predict`."""

from contextlib import ExitStack
from typing import Any

import torch

from mcbn import batches
from mcbn.errors import MCBNError, extra
from mcbn.model import MCBN
from mcbn.network import Output

with extra("lightning", "mcbn.lightning needs lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["MCBNCallback"]


class MCBNCallback(Callback):
    """Fit MCBN when training ends; then `Trainer.predict` gives mcbn predictions, one a batch.

    The statistics come from the trainer's own training loader (dataset, transforms, batch size), tau from its
    validation loader, the network from the module's `forward` with the weights of the last step. The fitted
    `mcbn.MCBN` is `callback.bayes`. The module is copied, never modified; only while `Trainer.predict` runs does its
    `predict_step` answer with `bayes.predict`, and it is put back also after an exception.

    Args:
        task: "regression" or "classification".
        n_samples, batch_size, seed, posterior, layers, inputs, output: as of `MCBN` and `MCBN.fit`.
        tune: set tau on the first validation loader, where there is one.
        targets: what of a validation batch is the target, as of `MCBN.tune`.
        predict: options of `MCBN.predict`, such as {"method": "linear"}.
    """

    def __init__(
        self,
        task: str,
        *,
        n_samples: int = 100,
        batch_size: int | None = None,
        seed: int = 0,
        posterior: str = "sample",
        layers: Any = None,
        inputs: batches.Picker = None,
        output: Output = None,
        tune: bool = True,
        targets: batches.Picker = None,
        predict: dict[str, Any] | None = None,
    ) -> None:
        self.task, self.tune, self.targets = task, tune, targets
        self.of_model = {"layers": layers, "inputs": inputs, "output": output}
        self.of_fit = dict[str, Any](n_samples=n_samples, batch_size=batch_size, seed=seed, posterior=posterior)
        self.of_predict = dict(predict or {})
        self.bayes: MCBN[Any] | None = None
        self._restore = ExitStack()  # of the module's own predict_step, while ours stands in its place

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit on the training loader, tune on the validation loader."""
        bayes: MCBN[Any] = MCBN(pl_module, self.task, **self.of_model)
        bayes.fit(_first(trainer.train_dataloader), **self.of_fit)
        validation = _first(trainer.val_dataloaders)
        if self.tune and validation is not None:
            bayes.tune(validation, targets=self.targets)
        self.bayes = bayes

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let `predict_step` answer with uncertainty."""
        if self.bayes is None:
            raise MCBNError("MCBNCallback has not been fitted: run Trainer.fit with it, or set callback.bayes")
        bayes, options = self.bayes, self.of_predict
        keys = bayes.engine.network.accepted_keys

        def predict_step(batch: Any, *_: Any, **__: Any) -> Any:
            picked = batches.pick_inputs(batch, bayes.inputs, keys)
            with torch.inference_mode(False):  # method="linear" needs gradients, which the trainer turns off
                return bayes.predict(batches.copied(picked), **options)

        own = vars(pl_module)
        self._restore.callback(own.update, {name: own[name] for name in own if name == "predict_step"})
        self._restore.callback(own.pop, "predict_step")  # undone first
        own["predict_step"] = predict_step

    def on_predict_end(self, *_: Any, **__: Any) -> None:
        """Put the module's own `predict_step` back."""
        self._restore.close()

    on_exception = on_predict_end


def _first(loaders: Any) -> Any:
    """Return the only or first of a trainer's loaders, None where there is none."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    return next(iter(loaders), None) if isinstance(loaders, list | tuple) else loaders
