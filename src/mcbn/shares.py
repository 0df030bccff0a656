"""Which of the T draws each of several workers takes."""

from collections.abc import Iterable
from itertools import pairwise

from mcbn import batches
from mcbn.engine.record import GROUP
from mcbn.errors import MCBNError


def share(draws: Iterable[int], n_samples: int, family: str = "sample") -> list[int]:
    """Check the t of a share of T draws; return them ascending."""
    n_samples = batches.require_int("n_samples", n_samples, 1)
    numbers = sorted(batches.require_int("a number of draws=", t, 0) for t in draws)
    if not numbers or numbers[-1] >= n_samples or len(set(numbers)) < len(numbers):
        raise MCBNError(f"draws= must name some of the draws 0 to {n_samples - 1}, each once; got {numbers[:8]}")
    if family != "sample":
        raise MCBNError(
            f'draws= goes with posterior="sample", got {family!r}; merge the shares, then take Posterior.as_gaussian'
        )
    return numbers


def shares(n_samples: int, workers: int) -> list[range]:
    """Deal T draws out to workers in whole groups, as even as groups allow; a worker may get none.

    Draws of one group run in one pass (`mcbn.engine.record`): a group not cut has the bits it has in one process.
    """
    n_samples, workers = batches.require_int("n_samples", n_samples, 1), batches.require_int("workers", workers, 1)
    groups = -(-n_samples // GROUP)
    edges = [min(n_samples, GROUP * (groups * w // workers)) for w in range(workers + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]
