"""What became of a part, and of a whole job."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DONE, BAD, STOPPED = "done", "bad", "stopped"


@dataclass(frozen=True)
class Outcome:
    """One part: its rows are in a file, or its input cannot be read, or nothing can be written."""

    part: str
    status: str
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0  # of the whole part
    predicting: float = 0.0  # of these, in the network
    waited: float = 0.0  # by its worker, since the part before
    bad: tuple[dict[str, Any], ...] = ()  # inputs left out: file, rows, reason
    reason: str = ""

    def to_json(self) -> str:
        """Write as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Read what `to_json` wrote."""
        stored: dict[str, Any] = json.loads(text)
        return cls(**stored | {"bad": tuple(stored["bad"])})


@dataclass(frozen=True)
class Summary:
    """A finished job."""

    folder: Path
    rows: int
    parts: int
    resumed: int  # parts that were there before
    bad_files: tuple[dict[str, Any], ...]
    seconds: float
    outcomes: tuple[Outcome, ...] = field(repr=False, default=())  # of the parts of this run
