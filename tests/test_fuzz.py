"""A short run of `make fuzz`: random networks, damaged files, a killed process; seeds that once failed stay here."""

import pytest

from fuzz import files, kills, networks

FILES = [1447, 2968]  # headers without a task, with a setting that is not JSON
NETWORKS = [263, 511, 695, 1723]  # branches that are not taken in every pass


@pytest.mark.parametrize("seed", [*range(16), *NETWORKS])
def test_random_networks_equal_algorithm_1(seed: int) -> None:
    networks.check(seed)


@pytest.mark.slow
def test_more_random_networks_equal_algorithm_1() -> None:
    for seed in range(16, 100):
        networks.check(seed)


def test_damaged_files_are_refused_or_right() -> None:
    assert all(files.check(seed) in ("right", "refused", "old and unnoticed") for seed in [*range(150), *FILES])


@pytest.mark.slow
def test_killed_processes_leave_whole_files() -> None:
    for seed in range(3):
        assert kills.check(seed) in ("whole", "nothing")
