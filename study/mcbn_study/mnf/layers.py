"""Dense layers with multiplicative normalising flows (Louizos and Welling 2017), S networks as one program.

Symbols: S networks in a stack, B rows of a batch, T draws, I inputs and O outputs of a layer, F steps of a flow.
All randomness comes in as standard normal numbers, so a pass is a function of its arguments.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn_study.mnf.flows import HALF, MaskedFlow, initial, zeros

INITIAL_LOG_STD = -9.0  # of a weight given z; the published code names it "logvar" and takes exp of it for the std
INITIAL_LOG_VAR = -9.0  # of a bias
INITIAL_Z_LOG_VAR = math.log(0.1)
MAX_STD = 0.5  # clips the std of weights and biases in passes (not in the KL), as the published scripts do
JITTER = 1e-6


class Sources(NamedTuple):
    """What of a layer's training pass does not wait for its inputs."""

    z: Tensor  # (S, B, I)
    var: Tensor  # (S, I, O), of the weights given z
    bias_var: Tensor  # (S, 1, O)
    kl: Tensor  # (S,)


class MNFLinear(nn.Module):
    """y = W^T x + b with q(W, b) = int q(W | z) q(z) dz q(b): Gaussians whose means are scaled by a flow's z.

    W_ij | z ~ N(z_i mu_ij, sigma_ij^2), z = flow(z_0), z_0 ~ N(m, v) of the input width; prior N(0, 1) on all of
    W and b (Louizos and Welling 2017). Parameters have a leading axis S.
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        generators: Sequence[torch.Generator],
        n_steps: int = 2,
        hidden_q: int = 50,
        hidden_r: int = 100,
    ) -> None:
        super().__init__()
        if min(n_inputs, n_outputs) < 1 or not generators:
            raise MCBNError(f"a layer needs inputs, outputs and a generator; got {n_inputs}, {n_outputs}, {generators}")
        S = len(generators)
        self.n_inputs, self.n_outputs, self.n_steps = n_inputs, n_outputs, n_steps
        self.mean = initial(generators, n_inputs, n_outputs)
        self.log_std = initial(generators, n_inputs, n_outputs, mean=INITIAL_LOG_STD, scale=JITTER)
        self.bias = zeros(S, 1, n_outputs)
        self.bias_log_var = _row(generators, n_outputs, mean=INITIAL_LOG_VAR, scale=JITTER)
        self.z_mean = _row(generators, n_inputs)
        self.z_log_var = _row(generators, n_inputs, mean=INITIAL_Z_LOG_VAR, scale=JITTER)
        self.c, self.b_mean, self.b_log_precision = (_row(generators, n_inputs) for _ in range(3))
        self.q = MaskedFlow(n_inputs, hidden=hidden_q, n_steps=n_steps, generators=generators)
        self.r = MaskedFlow(n_inputs, hidden=hidden_r, n_steps=n_steps, generators=generators)

    def pass_shapes(self, batch_size: int) -> list[tuple[int, ...]]:
        """Shapes of the normal numbers that `forward` takes: z_0, masks of q and of r, c^T W, outputs."""
        steps, inputs, outputs, rows = self.n_steps, self.n_inputs, self.n_outputs, batch_size + 1
        return [(rows, inputs), (steps, rows, inputs), (steps, 1, inputs), (1, outputs), (batch_size, outputs)]

    def draw_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the normal numbers behind one draw of `draw`: z_0, masks, W, b."""
        steps, inputs, outputs = self.n_steps, self.n_inputs, self.n_outputs
        return [(inputs,), (steps, inputs), (inputs, outputs), (outputs,)]

    def forward(self, x: Tensor, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run a training pass: x (S, B, I) -> outputs (S, B, O) and an unbiased estimate of the bound on the KL (S,).

        Every row has its own z, and W | z is integrated out row by row (local reparametrisation):
        y ~ N((x z) mu + b, x^2 sigma^2 + var b). The KL's z is one more row.
        """
        sources = self.sources(noise)
        return self.outputs(x, sources, noise), sources.kl

    def sources(self, noise: Sequence[Tensor]) -> Sources:
        """Compute what does not wait for the inputs of the layer: z, variances and the KL."""
        z_noise, q_masks, r_masks, a_noise, _ = noise
        B = z_noise.shape[1] - 1
        z, log_det = self._z(z_noise, _as_mask(q_masks))  # (S, B + 1, I), (S, B + 1)
        var, bias_var = torch.exp(2 * self.log_std), self.bias_log_var.exp()  # (S, I, O), (S, 1, O)
        kl = self.kl(z[:, B:], log_det[:, B], _as_mask(r_masks), a_noise, var, bias_var)
        return Sources(z[:, :B], var, bias_var, kl)

    def outputs(self, x: Tensor, sources: Sources, noise: Sequence[Tensor]) -> Tensor:
        """Send x (S, B, I) through the layer: (S, B, O)."""
        z, var, bias_var, _ = sources
        mean = torch.baddbmm(self.bias, x * z, self.mean)  # (S, B, O)
        variance = torch.baddbmm(bias_var.clamp(max=MAX_STD**2), x.square(), var.clamp(max=MAX_STD**2))  # (S, B, O)
        return torch.addcmul(mean, variance.sqrt(), noise[-1])

    def kl(self, z: Tensor, log_det: Tensor, r_masks: Tensor, a_noise: Tensor, var: Tensor, bias_var: Tensor) -> Tensor:
        """Estimate KL(q(W, b) || p(W, b)) from above with one z (S, 1, I), its flow's log_det (S,): (S,).

        KL <= E_q(z) [ KL(q(W|z) || p(W)) + log q(z) - E_q(W|z) log r(z|W) ] + KL(q(b) || p(b)),
        KL(q(W|z) || p(W)) = sum_ij 1/2 (sigma_ij^2 + z_i^2 mu_ij^2 - 1) - log sigma_ij,
        log q(z) = log N(z_0; m, v) - log_det, whose first term is taken at its mean, minus the entropy of z_0.
        The masks of the flows are drawn with z, and the bound is that given them.
        """
        scaled = torch.bmm(z.square(), self.mean.square())  # (S, 1, O)
        weights = 0.5 * scaled.sum((1, 2)) + (0.5 * var - self.log_std).sum((1, 2))  # (S,)
        biases = 0.5 * (bias_var + self.bias.square() - self.bias_log_var).sum((1, 2))
        entropy = 0.5 * self.z_log_var.sum((1, 2)) + log_det
        return weights + biases - entropy - self.log_r(z, r_masks, a_noise, var) - self._constant

    @property
    def _constant(self) -> float:
        """The terms of the KL that no parameter enters."""
        entropy = 0.5 * self.n_inputs * (math.log(2 * math.pi) + 1)
        return 0.5 * (self.n_inputs * self.n_outputs + self.n_outputs) + entropy

    def log_r(self, z: Tensor, masks: Tensor, a_noise: Tensor, var: Tensor) -> Tensor:
        """log r(z | W), (S,), with c^T W drawn given z (S, 1, I): c^T W ~ N((c z)^T mu, (c^2)^T sigma^2).

        a = mean_j tanh(c^T W)_j;  r: flow_r(z) ~ N(a b_mean, exp(-a b_log_precision)).
        Differs: the second is a log-precision, as in the published code; the paper has a sigmoid for the std.
        """
        spread = torch.bmm(self.c.square(), var).sqrt()  # (S, 1, O)
        projected = torch.addcmul(torch.bmm(self.c * z, self.mean), spread, a_noise)  # (S, 1, O)
        a = torch.tanh(projected).mean(2, keepdim=True)  # (S, 1, 1)
        end, log_det = self.r(z, masks)  # (S, 1, I), (S, 1)
        log_precision = a * self.b_log_precision
        square = log_precision.exp() * (end - a * self.b_mean).square()
        total: Tensor = 0.5 * (log_precision - square - math.log(2 * math.pi)).sum((1, 2)) + log_det[:, 0]
        return total

    def draw(self, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Draw T weights (S, T, I, O) and biases (S, T, 1, O), each for all inputs alike, by noise (S, T, ...)."""
        z_noise, masks, weight_noise, bias_noise = noise
        z, _ = self._z(z_noise, _as_mask(masks.transpose(1, 2)))  # (S, T, I)
        weight = torch.addcmul(z.unsqueeze(3) * self.mean.unsqueeze(1), self._std().unsqueeze(1), weight_noise)
        return weight, (self.bias + self._bias_std() * bias_noise).unsqueeze(2)

    def centre(self, x: Tensor) -> Tensor:
        """Run without noise, x (S, N, I) -> (S, N, O): z_0 at its mean, masks at 1/2, as in the published code."""
        masks = self.z_mean.new_full((len(self.z_mean), self.n_steps, 1, self.n_inputs), HALF)
        z, _ = self.q(self.z_mean, masks)  # (S, 1, I)
        return torch.baddbmm(self.bias, x * z, self.mean)

    def _z(self, noise: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        z: tuple[Tensor, Tensor] = self.q(self.z_mean + torch.exp(0.5 * self.z_log_var) * noise, masks)
        return z

    def _std(self) -> Tensor:
        return self.log_std.exp().clamp(max=MAX_STD)

    def _bias_std(self) -> Tensor:
        return torch.exp(0.5 * self.bias_log_var).clamp(max=MAX_STD)


def _row(generators: Sequence[torch.Generator], width: int, *, mean: float = 0.0, scale: float = 1.0) -> nn.Parameter:
    """Draw a vector parameter, kept as (S, 1, width)."""
    return nn.Parameter(initial(generators, width, mean=mean, scale=scale).detach().unsqueeze(1))


def _as_mask(noise: Tensor) -> Tensor:
    """Bernoulli(1/2) from the sign of normal numbers."""
    return (noise > 0).to(noise.dtype)


class MNFNetwork(nn.Module):
    """Dense MNF layers with ReLU between: S networks (S, N, Q) -> (S, N, D), network s from generators[s]."""

    def __init__(self, sizes: Sequence[int], *, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        if len(self.sizes) < 2:
            raise MCBNError(f"sizes must name inputs and outputs at least, got {self.sizes}")
        self.layers = nn.ModuleList(MNFLinear(i, o, generators=generators) for i, o in pairwise(self.sizes))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Run a training pass with noise (S, `noise_size(B)`): outputs (S, B, D), KL (S,)."""
        parts = self.cut(noise, x.shape[1])
        return self.outputs(
            x, [layer.sources(part) for layer, part in zip(self.linear_layers(), parts, strict=True)], parts
        )

    def cut(self, noise: Tensor, batch_size: int) -> list[list[Tensor]]:
        """Cut noise (S, `noise_size(B)`) into the parts of every layer."""
        return _cut(noise, [layer.pass_shapes(batch_size) for layer in self.linear_layers()])

    def outputs(self, x: Tensor, sources: Sequence[Sources], parts: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Send x (S, B, Q) through the layers, given the sources of each: outputs (S, B, D), KL (S,)."""
        kl = torch.zeros((), dtype=x.dtype, device=x.device)
        for i, (layer, own, part) in enumerate(zip(self.linear_layers(), sources, parts, strict=True)):
            x = layer.outputs(x.relu() if i else x, own, part)
            kl = kl + own.kl
        return x, kl

    def sample(self, x: Tensor, noise: Tensor) -> Tensor:
        """Send x (S, N, Q) through T networks drawn by noise (S, T, `draw_size`): (S, T, N, D)."""
        h = x.unsqueeze(1)  # (S, 1, N, Q)
        parts = _cut(noise, [layer.draw_shapes() for layer in self.linear_layers()])
        for i, layer in enumerate(self.linear_layers()):
            weight, bias = layer.draw(parts[i])
            h = torch.matmul(h.relu() if i else h, weight) + bias  # (S, T, N, O)
        return h

    def centre(self, x: Tensor) -> Tensor:
        """Run without noise: (S, N, Q) -> (S, N, D)."""
        for i, layer in enumerate(self.linear_layers()):
            x = layer.centre(x.relu() if i else x)
        return x

    def noise_size(self, batch_size: int) -> int:
        """Count the normal numbers of one training pass of one network."""
        return sum(math.prod(shape) for layer in self.linear_layers() for shape in layer.pass_shapes(batch_size))

    @property
    def draw_size(self) -> int:
        """Count the normal numbers behind one draw of one network."""
        return sum(math.prod(shape) for layer in self.linear_layers() for shape in layer.draw_shapes())

    def linear_layers(self) -> list[MNFLinear]:
        """List the layers in order."""
        return [layer for layer in self.layers if isinstance(layer, MNFLinear)]


def _cut(noise: Tensor, shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Cut noise (..., n) into the parts of every layer, each (..., *shape)."""
    pieces = iter(torch.split_with_sizes(noise, [math.prod(shape) for layer in shapes for shape in layer], -1))
    return [[torch.unflatten(next(pieces), -1, shape) for shape in layer] for layer in shapes]
