"""How large a run is: the paper's setting, and one that two cores finish in minutes."""

from dataclasses import asdict, dataclass
from typing import Any

from mcbn_study.data.scenes import SCENE_SETS, Scenes, Size, load_scenes
from mcbn_study.networks import SEGNET_WIDTHS, MobileSegmenter, SegNet
from mcbn_study.profiles import read_profiles


@dataclass(frozen=True)
class SceneProfile:
    """Sizes of training and evaluation on one set; None: all images, or their own size."""

    name: str
    dataset: str
    test_part: str
    batch_size: int  # M of training and of MCBN alike
    epochs: int
    widths: tuple[int, ...] = SEGNET_WIDTHS
    n_samples: int = 20  # T; Teye et al. 2018, Section 4.5
    memory_samples: tuple[int, int] = (5, 50)
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warm_up: float = 0.05  # share of the steps
    weight_power: float = 0.5  # of the class weights: 1 as SegNet's, 0 none; 0.5 trades recall of rare classes for IoU
    check_every: int = 25  # epochs between looks at the validation part, where there is one
    save_every: int = 10  # epochs between lines that say how it goes
    tuned_batch_sizes: tuple[int, ...] = ()  # M tried on the validation part
    examples: int = 4  # images shown
    size: Size | None = None
    limit: int | None = None
    seed: int = 0

    @property
    def title(self) -> str:
        """Name its network, records and pictures."""
        return f"{self.dataset}_pretrained" if self.name == "pretrained" else self.dataset

    def network(self) -> SegNet | MobileSegmenter:
        """Build the network, with its first weights."""
        kind = SegNet if self.title == self.dataset else MobileSegmenter
        return kind(len(SCENE_SETS[self.dataset].classes), widths=self.widths, seed=self.seed)

    def settings(self) -> dict[str, Any]:
        """Return all of it as a record keeps it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def load(self, part: str) -> Scenes:
        """Read one part of the set, at the size of the run."""
        scenes = load_scenes(SCENE_SETS[self.dataset], part, limit=self.limit)
        return scenes if self.size is None else scenes.shrink(self.size)


PROFILES = read_profiles("segmentation", SceneProfile, "name", "dataset")
