"""MCBN on a network that somebody else trained, used as it comes: a ResNet of CIFAR-10.

    python examples/foreign_network.py --test 200       # minutes on a CPU
    python examples/foreign_network.py --device cuda    # all 10,000 test images

Batch statistics should come from images made as in training. Where they do not, mcbn warns; where nobody has such
images, `fit(centre="running")` takes the spread of the draws from those at hand, and their centre from the network.

Needs: CIFAR-10 (`mcbn data cifar10`), and resnet32.npz or resnet20.npz, the weights of
github.com/akamaster/pytorch_resnet_cifar10, in $MCBN_DATA_DIR/cifar10_resnet.
"""

import warnings
from pathlib import Path

import typer
from torch import Tensor

import mcbn
from mcbn_study.data.cifar import CIFAR10_SHAPE, cifar10, require_images
from mcbn_study.foreign import run as foreign
from mcbn_study.journal import Journal


def main(
    network: str = "resnet32",
    test: int = 10_000,
    samples: int = 128,
    device: str = "cpu",
    out: Path = Path("results/foreign"),
) -> None:
    """Score a network on so many test images: plain, and with T samples of its batch statistics."""
    weights = foreign.data_folder() / "cifar10_resnet" / f"{network}.npz"
    bayes = mcbn.MCBN(foreign.load_resnet(weights).to(device), "classification")
    train, images = cifar10("train"), cifar10("test")
    x, y = foreign.normalise(require_images(images.x, CIFAR10_SHAPE)[:test]).to(device), images.y[:test]
    journal = Journal(out, {"n_samples": samples, "n": test}, device)

    def score(method: str, warning: str = "") -> None:
        def probabilities(part: Tensor) -> Tensor:
            return bayes.plain(part).softmax(1) if method == "plain" else bayes.predict(part).probs

        row = {"kind": "foreign", "network": network, "method": method, "warning": warning}
        journal.add([row | foreign.predict_and_score(probabilities, x, y)])

    score("plain")
    bayes.fit(foreign.framed_crops(train.x), n_samples=samples, batch_size=32)  # crops as in its training
    score("MCBN, M = 32")
    bayes.posterior = bayes.posterior.at_batch_size(16)  # a stronger posterior, no data needed
    score("MCBN, M = 16")
    for centre, name in (("drawn", "not augmented"), ("running", "not augmented, recentred")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bayes.fit(foreign.normalise(train.x[:10_000]), n_samples=samples, batch_size=32, centre=centre)
        score(f"MCBN, M = 32, {name}", " ".join(str(w.message) for w in caught if "mcbn" in str(w.message)))
    print(foreign.write_report(out).read_text())


if __name__ == "__main__":
    typer.run(main)
