"""What was set out to be reached, as data."""

from typing import Literal, NamedTuple

ALGORITHM_1, PLAIN, PEER = "algorithm 1", "plain x T", "torch-uncertainty"
CRPS_DIFFERENCE = "CRPS difference"
LESS_DRAWS = "T=5"
LINEAR_DATA = ("boston", "concrete", "yacht", "energy")


class Target(NamedTuple):
    """A ratio to reach against something, or to stay below."""

    case: str
    n: int | None  # None: whatever the test part holds
    against: str
    bound: Literal["at least", "at most"]
    value: float

    @property
    def text(self) -> str:
        """The target in words, such as "at least 300x"."""
        return f"{self.bound} {show_ratio(self.against, self.value)}"

    def verdict(self, ratio: float, n_samples: int | None) -> str:
        """Say whether a ratio of T draws reaches the target, or how far it is from it."""
        if n_samples != SAMPLES.get(self.case, n_samples):
            return f"the target is for T={SAMPLES[self.case]}"
        reached = ratio >= self.value if self.bound == "at least" else ratio <= self.value
        word = "short" if self.bound == "at least" else "over"
        missing = abs(ratio / self.value - 1)
        return "reached" if reached else f"{word} by {missing:.0%}" if missing >= 0.005 else f"{word} by {missing:.1%}"


def show_ratio(against: str, ratio: float) -> str:
    """Print a ratio in its unit: percent for scores, times for the rest."""
    return f"{ratio:+.2%}" if against == CRPS_DIFFERENCE else f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


# (device, case) -> N -> times faster than (algorithm 1, plain x T); None: no target.
SPEED: dict[tuple[str, str], dict[int, tuple[float, float | None]]] = {
    ("cpu", "mlp"): {1: (300, 50), 100: (20, 6), 2000: (3, 1.5), 20_000: (2, 1.5)},
    ("cpu", "resnet32"): {1: (50, 4), 32: (2.5, 1.3), 256: (1.8, 1.4)},
    ("cuda", "resnet32"): {1: (150, None), 32: (60, None), 256: (12, 1.3)},
    ("cuda", "resnet50"): {1: (30, None), 32: (6, None), 256: (3, 1.2)},
}
# T the targets are for
SAMPLES = {"mlp": 500, "resnet32": 128, "unet": 20, "resnet50": 32, "memory mlp": 500, "memory unet": 500}
PEER_CASES = {"cpu": {"resnet32": (1, 32, 256), "unet": (1, 8)}}
PEER_CASES["cuda"] = PEER_CASES["cpu"] | {"resnet50": (1, 32, 256)}
PEER_ONE_INPUT, PEER_ANY = 15.0, 1.0  # never slower
LINEAR_SPEED, LINEAR_CRPS = 200.0, 0.01
FIT_ROWS = ("fit mlp 1,000 rows", "fit mlp 100,000 rows", "fit mlp T=500", "fit resnet32", "fit resnet32 T=128")
FORWARDS, FIT_SPEED, FIT_BATCH = "training forwards", 1.0, 32  # no slower than as many of them
MEMORY_GROWTH = 1.5  # T=500 over T=5
MEMORY_ROWS = (("memory mlp", 2000), ("memory mlp", 100_000), ("memory unet", 1))


def targets(device: str) -> list[Target]:
    """List every target for this kind of device."""
    found = [*_speed(device), *_peer(device)]
    found += [Target(case, n, LESS_DRAWS, "at most", MEMORY_GROWTH) for case, n in MEMORY_ROWS]
    found += [Target(case, FIT_BATCH, FORWARDS, "at least", FIT_SPEED) for case in FIT_ROWS]
    if device == "cpu":
        found += [Target(f"linear {name}", None, ALGORITHM_1, "at least", LINEAR_SPEED) for name in LINEAR_DATA]
        found += [Target(f"linear {name}", None, CRPS_DIFFERENCE, "at most", LINEAR_CRPS) for name in LINEAR_DATA]
    return found


def _speed(device: str) -> list[Target]:
    return [
        Target(case, n, against, "at least", value)
        for (kind, case), sizes in SPEED.items()
        for n, values in sizes.items()
        for against, value in zip((ALGORITHM_1, PLAIN), values, strict=True)
        if kind == device and value is not None
    ]


def _peer(device: str) -> list[Target]:
    return [
        Target(case, n, PEER, "at least", PEER_ONE_INPUT if n == 1 else PEER_ANY)
        for case, sizes in PEER_CASES[device].items()
        for n in sizes
    ]
