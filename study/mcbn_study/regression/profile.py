"""What a study runs: the paper's grid and protocol, and a small one that ends in minutes on two cores."""

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from mcbn.data import NAMES, describe, split
from mcbn_study.journal import digest
from mcbn_study.profiles import read_profiles

METHODS = ("mcbn", "bn", "mcdo", "do", "mnf", "ensemble")
FORMAT = 1  # of the records; another one makes another configuration

# Fields newer than the format, left out at their default: older folders stay valid
ADDED = {"patience_epochs": 200, "search_seed": 1}
ADDED |= dict.fromkeys(("fresh_draws", "full_batches", "one_stream", "published_mnf"), False)
DROPPED = {"tf32": False}  # a field no more, in every older folder
LARGEST_BATCH = {"energy": 512}  # published code


class Configuration(NamedTuple):
    """One point of the grid; rate is None in the BN family, weight_decay in MNF."""

    weight_decay: float | None
    batch_size: int
    rate: float | None = None


@dataclass(frozen=True)
class Profile:
    """All settings of a study. Defaults: Teye et al. 2018, Section 4.3, and the authors' published code."""

    name: str = "paper"
    datasets: tuple[str, ...] = NAMES
    splits: tuple[int, ...] = (1, 2, 3, 4, 5)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # of the tested networks
    search_seed: int = 1  # of the fold networks
    # Four switches: do as the authors' code does where ours differs
    fresh_draws: bool = False  # every validation draws anew
    full_batches: bool = False  # batch sizes above the rows stay in the grid and mean all rows
    one_stream: bool = False  # the fold networks of all splits and folds begin with the same random numbers
    published_mnf: bool = False  # MNF stops by the rule of their script
    n_folds: int = 5
    weight_decays: tuple[float, ...] = tuple(10.0**-k for k in range(1, 16))
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.01, 0.005, 0.001)
    dropout_batch_size: int = 32
    evaluate_every: int = 20
    patience: int = 10  # evaluations
    patience_epochs: int = 200  # of MNF, which is validated every epoch
    max_epochs: int = 2000
    n_samples: int = 500  # T of tau and of test scores
    selection_samples: int = 500  # T of the validation RMSE during the search
    selection_samples_large: int = 100  # that of data sets above `large` rows
    large: int = 20_000
    sensitivity_splits: tuple[int, ...] = (1, 2, 3)
    sensitivity_batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    sensitivity_samples: int = 100
    sensitivity_pass_counts: tuple[int, ...] = (250, 100, 50)
    sensitivity_pass_batch_size: int = 128
    format: int = field(default=FORMAT)

    def batch_sizes_of(self, dataset: str) -> tuple[int, ...]:
        """Return the batch sizes of the grid that are not above the train+CV part, or all."""
        n = max(self.batch_sizes) if self.full_batches else len(split(describe(dataset).n, 1).train)
        return tuple(size for size in self.batch_sizes if size <= min(n, LARGEST_BATCH.get(dataset, n)))

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON has them."""
        plain: dict[str, object] = json.loads(json.dumps(asdict(self))) | DROPPED
        return {name: value for name, value in plain.items() if ADDED.get(name) != value}

    @property
    def hash(self) -> str:
        """Name the configuration by 12 hexadecimal digits."""
        return digest(self.settings())


PROFILES = read_profiles("regression", Profile, "name")
PAPER, QUICK = PROFILES["paper"], PROFILES["quick"]
