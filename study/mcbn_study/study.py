"""A study of the paper's regression networks at work: what each of its parts needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import Numerics, environment
from mcbn_study.progress import Progress
from mcbn_study.regression.profile import Profile


class Study:
    """One study in one folder on one device.

    `compiled` fuses elementwise work by torch.compile, `fused` many training steps into one CUDA kernel: for a GPU.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        out: str | Path,
        device: str = "cpu",
        *,
        compiled: bool = False,
        fused: bool = False,
    ) -> None:
        self.name, self.profile, self.device = name, profile, device
        self.journal = CellJournal(out, profile.settings())
        self.numerics = Numerics(profile.tf32, compiled, fused)
        self.progress = Progress()
        self._where = environment(device)

    @contextmanager
    def progressing(self, total: float) -> Iterator[None]:
        """Show how much of work of this weight is done."""
        self.progress = Progress(total, self.name)
        try:
            yield
        finally:
            self.progress.close()

    def record(self, kind: str, seconds: float, **fields: Any) -> Record:
        """Make a record with what all have in common: where and by what configuration it was made."""
        start: Record = {"kind": kind, "study": self.name, "profile": self.profile.name}
        where = {"device": self._where.hardware, "commit": self._where.commit, "config_hash": self.profile.hash}
        return start | fields | {"seconds": round(seconds, 3)} | where
