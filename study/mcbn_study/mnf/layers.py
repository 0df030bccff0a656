"""Dense layers with multiplicative normalising flows (Louizos and Welling 2017), S networks as one program.

The flows are masked RealNVP (Dinh et al. 2017). All randomness comes in as standard normal numbers, so a pass is a
function of its arguments. Symbols: S networks in a stack, B rows of a batch, R rows, T draws, I inputs and O outputs of
a layer (I is the width of its z), H hidden width of a flow, F steps of a flow.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from mcbn.errors import MCBNError

GATE_BIAS = 2.0  # published code: gates start near 1, the flow near the identity
HALF = 0.5  # masks are Bernoulli(0.5); their mean stands for them in the deterministic pass
INITIAL_LOG_STD = -9.0  # of a weight given z; the published code names it "logvar" and takes exp of it for the std
INITIAL_LOG_VAR = -9.0  # of a bias
INITIAL_Z_LOG_VAR = math.log(0.1)
MAX_STD = 0.5  # clips the std of weights and biases in passes (not in the KL), as the published scripts do
JITTER = 1e-6
STEPS = 2  # of a flow, in the published script
Streams = Sequence[torch.Generator]  # one a network


def initial(generators: Streams, *shape: int, mean: float = 0.0, scale: float = 1.0) -> nn.Parameter:
    """Draw a parameter (S, *shape): N(mean, scale^2 4 / (fan in + fan out)), "he2" of the published code."""
    std = scale * math.sqrt(4 / sum(shape))
    drawn = [torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for g in generators]
    return nn.Parameter(mean + std * torch.stack(drawn))


class FlowStep(nn.Module):
    """One step: the entries that the mask hides are moved, given those that it shows.

    z' = m z + (1 - m) (g z + (1 - g) mu),   log |det dz'/dz| = sum_i (1 - m_i) log g_i,
    (mu, a) = tanh((m z) W_1 + b_1) W_2 + b_2,   g = sigmoid(a).   As in the published code of Louizos and Welling 2017.
    """

    def __init__(self, width: int, hidden: int, generators: Streams) -> None:
        super().__init__()
        S = len(generators)
        self.weight_in = initial(generators, width, hidden)
        self.bias_in = nn.Parameter(torch.zeros(S, 1, hidden))
        shift, gate = initial(generators, hidden, width), initial(generators, hidden, width)
        self.weight_out = nn.Parameter(torch.cat([shift, gate], 2).detach())  # (S, H, 2 I): one product for both
        self.bias_out = nn.Parameter(torch.cat([torch.zeros(S, 1, width), torch.full((S, 1, width), GATE_BIAS)], 2))

    def forward(self, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Move z (S, R, I) by mask (S, R, I): the new z, and the log-determinant (S, R)."""
        hidden = torch.tanh(torch.baddbmm(self.bias_in, mask * z, self.weight_in))  # (S, R, H)
        shift, logit = torch.baddbmm(self.bias_out, hidden, self.weight_out).chunk(2, 2)  # (S, R, I) each
        return torch.lerp(torch.lerp(shift, z, torch.sigmoid(logit)), z, mask), ((1 - mask) * logsigmoid(logit)).sum(2)


def follow(steps: nn.ModuleList, z: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Send z (S, R, I) through a flow with masks (S, F, R, I), new ones for every row: z and log-determinant (S, R)."""
    log_det = torch.zeros((), dtype=z.dtype, device=z.device)
    for step, mask in zip(steps, masks.unbind(1), strict=True):
        z, change = step(z, mask)
        log_det = log_det + change
    return z, log_det


class MNFLinear(nn.Module):
    """y = W^T x + b with q(W, b) = int q(W | z) q(z) dz q(b): Gaussians whose means are scaled by a flow's z.

    W_ij | z ~ N(z_i mu_ij, sigma_ij^2), z = flow(z_0), z_0 ~ N(m, v) of the input width; prior N(0, 1) on all of
    W and b (Louizos and Welling 2017). Parameters have a leading axis S.
    """

    def __init__(
        self, n_inputs: int, n_outputs: int, *, generators: Streams, hidden_q: int = 50, hidden_r: int = 100
    ) -> None:
        super().__init__()
        if min(n_inputs, n_outputs) < 1 or not generators:
            raise MCBNError(f"a layer needs inputs, outputs and a generator; got {n_inputs}, {n_outputs}, {generators}")
        S = len(generators)
        self.n_inputs, self.n_outputs = n_inputs, n_outputs
        self.mean = initial(generators, n_inputs, n_outputs)
        self.log_std = initial(generators, n_inputs, n_outputs, mean=INITIAL_LOG_STD, scale=JITTER)
        self.bias = nn.Parameter(torch.zeros(S, 1, n_outputs))
        self.bias_log_var = _row(generators, n_outputs, mean=INITIAL_LOG_VAR, scale=JITTER)
        self.z_mean = _row(generators, n_inputs)
        self.z_log_var = _row(generators, n_inputs, mean=INITIAL_Z_LOG_VAR, scale=JITTER)
        self.c, self.b_mean, self.b_log_precision = (_row(generators, n_inputs) for _ in range(3))
        self.q = nn.ModuleList(FlowStep(n_inputs, hidden_q, generators) for _ in range(STEPS))
        self.r = nn.ModuleList(FlowStep(n_inputs, hidden_r, generators) for _ in range(STEPS))

    def pass_shapes(self, batch_size: int) -> list[tuple[int, ...]]:
        """Shapes of the normal numbers that `forward` takes: z_0, masks of q and of r, c^T W, outputs."""
        inputs, outputs, rows = self.n_inputs, self.n_outputs, batch_size + 1
        return [(rows, inputs), (STEPS, rows, inputs), (STEPS, 1, inputs), (1, outputs), (batch_size, outputs)]

    def draw_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the normal numbers behind one draw of `draw`: z_0, masks, W, b."""
        inputs, outputs = self.n_inputs, self.n_outputs
        return [(inputs,), (STEPS, inputs), (inputs, outputs), (outputs,)]

    def forward(self, x: Tensor, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run a training pass: x (S, B, I) -> outputs (S, B, O) and an unbiased estimate of the bound on the KL (S,).

        Every row has its own z, and W | z is integrated out row by row (local reparametrisation):
        y ~ N((x z) mu + b, x^2 sigma^2 + var b). The KL's z is one more row.
        """
        z_noise, q_masks, r_masks, a_noise, output_noise = noise
        B = x.shape[1]
        z, log_det = self._z(z_noise, _as_mask(q_masks))  # (S, B + 1, I), (S, B + 1)
        var, bias_var = torch.exp(2 * self.log_std), self.bias_log_var.exp()  # (S, I, O), (S, 1, O)
        kl = self.kl(z[:, B:], log_det[:, B], _as_mask(r_masks), a_noise, var, bias_var)
        mean = torch.baddbmm(self.bias, x * z[:, :B], self.mean)  # (S, B, O)
        variance = torch.baddbmm(bias_var.clamp(max=MAX_STD**2), x.square(), var.clamp(max=MAX_STD**2))  # (S, B, O)
        return torch.addcmul(mean, variance.sqrt(), output_noise), kl

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
        constant = 0.5 * (self.n_inputs * (self.n_outputs + math.log(2 * math.pi) + 1) + self.n_outputs)
        return weights + biases - entropy - self.log_r(z, r_masks, a_noise, var) - constant

    def log_r(self, z: Tensor, masks: Tensor, a_noise: Tensor, var: Tensor) -> Tensor:
        """log r(z | W), (S,), with c^T W drawn given z (S, 1, I): c^T W ~ N((c z)^T mu, (c^2)^T sigma^2).

        a = mean_j tanh(c^T W)_j;  r: flow_r(z) ~ N(a b_mean, exp(-a b_log_precision)).
        Differs: the second is a log-precision, as in the published code; the paper has a sigmoid for the std.
        """
        spread = torch.bmm(self.c.square(), var).sqrt()  # (S, 1, O)
        a = torch.addcmul(torch.bmm(self.c * z, self.mean), spread, a_noise).tanh().mean(2, keepdim=True)  # (S, 1, 1)
        end, log_det = follow(self.r, z, masks)  # (S, 1, I), (S, 1)
        log_precision = a * self.b_log_precision
        square = log_precision.exp() * (end - a * self.b_mean).square()
        total: Tensor = 0.5 * (log_precision - square - math.log(2 * math.pi)).sum((1, 2)) + log_det[:, 0]
        return total

    def draw(self, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Draw T weights (S, T, I, O) and biases (S, T, 1, O), each for all inputs alike, by noise (S, T, ...)."""
        z_noise, masks, weight_noise, bias_noise = noise
        z, _ = self._z(z_noise, _as_mask(masks.transpose(1, 2)))  # (S, T, I)
        std = self.log_std.exp().clamp(max=MAX_STD).unsqueeze(1)  # (S, 1, I, O)
        bias_std = torch.exp(0.5 * self.bias_log_var).clamp(max=MAX_STD)
        weight = torch.addcmul(z.unsqueeze(3) * self.mean.unsqueeze(1), std, weight_noise)
        return weight, (self.bias + bias_std * bias_noise).unsqueeze(2)

    def centre(self, x: Tensor) -> Tensor:
        """Run without noise, x (S, N, I) -> (S, N, O): z_0 at its mean, masks at 1/2, as in the published code."""
        masks = self.z_mean.new_full((len(self.z_mean), STEPS, 1, self.n_inputs), HALF)
        z, _ = follow(self.q, self.z_mean, masks)  # (S, 1, I)
        return torch.baddbmm(self.bias, x * z, self.mean)

    def _z(self, noise: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        return follow(self.q, self.z_mean + torch.exp(0.5 * self.z_log_var) * noise, masks)


def _row(generators: Streams, width: int, *, mean: float = 0.0, scale: float = 1.0) -> nn.Parameter:
    """Draw a vector parameter, kept as (S, 1, width)."""
    return nn.Parameter(initial(generators, width, mean=mean, scale=scale).detach().unsqueeze(1))


def _as_mask(noise: Tensor) -> Tensor:
    """Bernoulli(1/2) from the sign of normal numbers."""
    return (noise > 0).to(noise.dtype)


class MNFNetwork(nn.Module):
    """Dense MNF layers with ReLU between: S networks (S, N, Q) -> (S, N, D), network s from generators[s]."""

    def __init__(self, sizes: Sequence[int], *, generators: Streams) -> None:
        super().__init__()
        self.sizes = list(sizes)
        if len(self.sizes) < 2:
            raise MCBNError(f"sizes must name inputs and outputs at least, got {self.sizes}")
        self.linear = [MNFLinear(i, o, generators=generators) for i, o in pairwise(self.sizes)]
        self.layers = nn.ModuleList(self.linear)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Run a training pass with noise (S, `noise_size(B)`): outputs (S, B, D), KL (S,)."""
        noises = _cut(noise, [layer.pass_shapes(x.shape[1]) for layer in self.linear])
        kl = torch.zeros((), dtype=x.dtype, device=x.device)
        for i, layer in enumerate(self.linear):
            x, of_layer = layer(x.relu() if i else x, noises[i])
            kl = kl + of_layer
        return x, kl

    def sample(self, x: Tensor, noise: Tensor) -> Tensor:
        """Send x (S, N, Q) through T networks drawn by noise (S, T, `draw_size`): (S, T, N, D)."""
        h = x.unsqueeze(1)  # (S, 1, N, Q)
        noises = _cut(noise, [layer.draw_shapes() for layer in self.linear])
        for i, layer in enumerate(self.linear):
            weight, bias = layer.draw(noises[i])
            h = torch.matmul(h.relu() if i else h, weight) + bias  # (S, T, N, O)
        return h

    def centre(self, x: Tensor) -> Tensor:
        """Run without noise: (S, N, Q) -> (S, N, D)."""
        for i, layer in enumerate(self.linear):
            x = layer.centre(x.relu() if i else x)
        return x

    def noise_size(self, batch_size: int) -> int:
        """Count the normal numbers of one training pass of one network."""
        return sum(math.prod(shape) for layer in self.linear for shape in layer.pass_shapes(batch_size))

    @property
    def draw_size(self) -> int:
        """Count the normal numbers behind one draw of one network."""
        return sum(math.prod(shape) for layer in self.linear for shape in layer.draw_shapes())


def _cut(noise: Tensor, shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Cut noise (..., n) into the noises of every layer, each (..., *shape)."""
    pieces = iter(torch.split_with_sizes(noise, [math.prod(shape) for layer in shapes for shape in layer], -1))
    return [[torch.unflatten(next(pieces), -1, shape) for shape in layer] for layer in shapes]
