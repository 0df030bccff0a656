"""The trained network as a file: convolutions in half precision, so that it stays small."""

from pathlib import Path

import torch
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn_study.journal import digest
from mcbn_study.networks.segnet import SegNet
from mcbn_study.segmentation.profile import Profile


def save_network(network: SegNet, profile: Profile, path: Path) -> None:
    """Write the weights with the digest of the settings that made them."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file({name: _small(value) for name, value in network.state_dict().items()}, temporary, _metadata(profile))


def load_network(profile: Profile, n_classes: int, path: Path) -> SegNet:
    """Read the weights of exactly these settings, in eval mode."""
    from safetensors import SafetensorError, safe_open

    network = SegNet(n_classes, widths=profile.widths, seed=profile.seed)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata != _metadata(profile):
                raise MCBNError(
                    f"{path} was trained with other settings ({metadata.get('profile')}); remove it, or use another "
                    "folder with --out"
                )
            network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, RuntimeError) as error:
        raise MCBNError(f"{path} is no network of this study ({error}); remove it to train anew") from error
    return network.eval()


def _small(value: Tensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    return value.to(torch.float16) if value.ndim == 4 else value.clone()


def _metadata(profile: Profile) -> dict[str, str]:
    return {"dataset": profile.dataset, "profile": profile.name, "settings": digest(profile.settings())}
