"""Student's t distribution in a few lines: tail, quantile, the one-sample test and Welch's interval."""

import math
from collections.abc import Sequence

_LEVEL = 0.95


def two_sided(t: float, df: float) -> float:
    """Probability that |t| is exceeded: p = I_x(df / 2, 1 / 2), x = df / (df + t^2), I the incomplete beta function.

    Abramowitz and Stegun 1964, 26.7.1.
    """
    if math.isinf(t):
        return 0.0
    square = t * t / df
    return _incomplete_beta(1 / (1 + square), square / (1 + square), df / 2, 0.5)


def critical(df: float) -> float:
    """Return the t that is exceeded in absolute value with probability 5 %."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > 1 - _LEVEL:
        high *= 2
    for _ in range(60):  # bisection to the last bits
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > 1 - _LEVEL else (low, middle)
    return (low + high) / 2


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error sqrt(sum (v - mean)^2 / (n - 1) / n); no error for a single value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def p_value(n: int, mean: float, error: float | None) -> float | None:
    """Two-sided one-sample t-test of mean 0: t = mean / error with n - 1 degrees of freedom.

    Two-sided because the paper gives stars to scores below 0 too, and its p-values follow so from its means and errors.
    None where nothing can be said: a single run, or only zeros.
    """
    if error is None or (error == 0 and mean == 0):
        return None
    return two_sided(mean / error if error else math.inf, n - 1)


def welch(mean: float, error: float, n: int, mean_2: float, error_2: float, n_2: int) -> tuple[float, float, float]:
    """Return the difference of two means and the ends of its 95 % interval, from standard errors.

    d = mean - mean_2, s^2 = e^2 + e_2^2, d +- t s with df = s^4 / (e^4 / (n - 1) + e_2^4 / (n_2 - 1)). Welch 1947.
    """
    difference = mean - mean_2
    a, b = error**2, error_2**2
    if a + b == 0:
        return difference, difference, difference
    share, share_2 = a / (a + b), b / (a + b)
    half = critical(1 / (share**2 / (n - 1) + share_2**2 / (n_2 - 1))) * math.sqrt(a + b)
    return difference, difference - half, difference + half


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """I_x(a, b) for y = 1 - x, given apart so that neither end loses digits. Abramowitz and Stegun 1964, 26.5.8."""
    if x == 0 or y == 0:
        return float(y == 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(y, x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    return math.exp(log_front) / a / _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d_1 / (1 + d_2 / (1 + ...)) from the back; for x <= (a + 1) / (a + b + 2) these terms are ample."""
    value = 1.0
    for m in range(20 + int(5 * math.sqrt(max(a, b))), -1, -1):
        value = 1 - (a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)) / value  # d_2m+1
        if m > 0:
            value = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / value  # d_2m
    return value
