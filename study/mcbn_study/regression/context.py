"""What every part of a study needs: its profile, its folder, its device."""

from dataclasses import dataclass, field
from typing import Any

from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import Environment, environment
from mcbn_study.progress import Progress
from mcbn_study.regression.profile import Profile


@dataclass
class Context:
    """One study in one folder on one device."""

    study: str
    profile: Profile
    store: CellJournal
    device: str
    compiled: bool = False
    fused: bool = False
    progress: Progress = field(default_factory=lambda: Progress(0))
    where: Environment = field(init=False)

    def __post_init__(self) -> None:
        self.where = environment(self.device)

    def record(self, kind: str, seconds: float, **fields: Any) -> Record:
        """Make a record with what all have in common."""
        start: Record = {"kind": kind, "study": self.study, "profile": self.profile.name}
        return start | fields | {"seconds": round(seconds, 3)} | self.common

    @property
    def numerics(self) -> dict[str, bool]:
        """Return how to compute, as an evaluator takes it; a trainer takes `fused` too."""
        return {"tf32": self.profile.tf32, "compiled": self.compiled}

    @property
    def common(self) -> Record:
        """Return where and by what configuration a record was made."""
        hardware, commit = self.where.hardware, self.where.commit
        return {"device": hardware, "commit": commit, "config_hash": self.profile.hash}
