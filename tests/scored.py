"""Random numbers to score, and one comparison for all scores."""

import torch

from kinds import normal


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_close(actual, expected, tolerance=1e-10):
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def classified(n=40, k=4, seed=0):
    probs = (2 * normal(n, k, seed=seed)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=generator(seed))[:, 0]  # calibrated: gaps of both signs
