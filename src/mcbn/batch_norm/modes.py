"""What modes answer: leave every call as it is, record one batch's statistics, put recorded ones back."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from mcbn.batch_norm.arithmetic import normalize, scale_and_shift, train_batch_norm
from mcbn.batch_norm.calls import BatchNormCall, BatchNormMode, layer_of
from mcbn.errors import MCBNError


class Survey(BatchNormMode):
    """Run the network as it is and note which modules call batch norm, in the order of their first call.

    The function also serves for instance norm and weight standardisation, on one row and with that row's statistics;
    such calls see no batch and are left alone.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers: dict[str, bool] = {}  # layer -> has running statistics
        self.rows = max((t.shape[0] for t in inputs if t.ndim > 0), default=0)
        self.batched = self.rows > 1
        self.pieces: dict[str, int] = {}  # layer -> rows of the pieces of the batch that it normalises one by one

    def answer(self, call: BatchNormCall) -> Tensor:
        """Note the caller."""
        if call.piece and call.x.shape[0] < self.rows:
            self.pieces[call.layer] = max(call.x.shape[0], self.pieces.get(call.layer, 0))
        if not (self.batched and call.training and call.x.shape[0] == 1):
            self.layers.setdefault(call.layer, call.running_mean is not None)
        return call.unchanged()


class Record(BatchNormMode):
    """Normalise chosen layers by the batch's own statistics, as in a training step, and keep those statistics.

    mu_B = mean_B(h), sigma^2_B = mean_B((h - mu_B)^2): biased, what training-mode BN divides by.
    """

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.chosen = layers
        self.mean: dict[str, Tensor] = {}  # call name -> (C,)
        self.var: dict[str, Tensor] = {}  # call name -> (C,), biased
        self.running: dict[str, tuple[Tensor, Tensor]] = {}
        self.values: dict[str, int] = {}  # call name -> values per channel in this batch

    def answer(self, call: BatchNormCall) -> Tensor:
        """Record this call's statistics and normalise by them."""
        if call.layer not in self.chosen:
            return call.unchanged()
        channels = call.x.shape[1]
        self.values[call.name] = call.x.numel() // max(channels, 1)
        if self.values[call.name] < 2:
            raise MCBNError(
                f"layer {call.name!r} sees one value a channel (input {tuple(call.x.shape)}), which has no variance; "
                "draw training batches of at least 2: batch_size=2 or more"
            )
        if call.running_mean is not None and call.running_var is not None:
            self.running[call.name] = (call.running_mean, call.running_var)
        output, mean, var = train_batch_norm(call.x, call.weight, call.bias, call.eps)
        self.mean[call.name], self.var[call.name] = mean, var
        return output


class Replay(BatchNormMode):
    """Normalise chosen layers by given statistics: one draw of the posterior."""

    def __init__(self, mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.mean, self.var = mean, var
        self.chosen = {layer_of(name) for name in mean}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise by the draw's statistics."""
        if call.layer not in self.chosen:
            return call.unchanged()
        name = self.drawn_name(call)
        mean, var = self.mean[name], self.var[name]  # (C,), (C,)
        return normalize(call.x, *scale_and_shift(mean, var, call.weight, call.bias, call.eps))

    def drawn_name(self, call: BatchNormCall) -> str:
        """Return whose statistics a call gets: its own, or those of the layer where it normalises a further piece.

        Ghost batch norm (Hoffer et al. 2017, arXiv 1705.08741) calls a layer once for every piece of a large batch.
        A draw is that of one piece, and all pieces of the inputs meet it.
        """
        if call.name in self.mean:
            return call.name
        if call.piece and f"{call.layer}#2" not in self.mean:
            return call.layer
        raise MCBNError(
            f"layer {call.layer!r} is called more often than when the posterior was drawn ({call.name!r} was not "
            "recorded); the network takes another path for these inputs: fit and predict on inputs of one kind"
        )
