import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from scipy import stats

from mcbn import plots
from mcbn.errors import MCBNError

Z50, Z95 = stats.norm.ppf(0.75), stats.norm.ppf(0.975)


def predictions(n=40, seed=0):
    rng = np.random.default_rng(seed)
    std = rng.uniform(0.5, 2.0, n)
    return rng.normal(size=n), std, rng.normal(size=n)


def line(ax, label):
    (line,) = [drawn for drawn in ax.lines if drawn.get_label().startswith(label)]
    return line


def band(ax, label, x, side=1):
    """Heights of a filled band at every x: its upper (side 1) or lower edge (side -1)."""
    (band,) = [drawn for drawn in ax.collections if isinstance(drawn, PolyCollection) and drawn.get_label() == label]
    vertices = band.get_paths()[0].vertices
    return np.array([side * max(side * vertices[np.isclose(vertices[:, 0], at), 1]) for at in x])


def dashed(ax):
    return [drawn.get_ydata() for drawn in ax.lines if drawn.is_dashed()]


def test_bands_are_gaussian_intervals_of_the_sorted_std():
    mean, std, y = predictions()
    ax = plots.uncertainty_error(mean, std, y)
    rank = np.arange(1, 41)
    np.testing.assert_allclose(band(ax, "50 % interval", rank), Z50 * np.sort(std), rtol=1e-10)
    np.testing.assert_allclose(band(ax, "95 % interval", rank), Z95 * np.sort(std), rtol=1e-10)
    np.testing.assert_array_equal(band(ax, "95 % interval", rank, side=-1), 0)


def test_dots_are_absolute_errors_in_the_order_of_std():
    mean, std, y = predictions()
    drawn = line(plots.uncertainty_error(mean, std, y), "absolute error")
    np.testing.assert_array_equal(drawn.get_xdata(), np.arange(1, 41))
    naive = [abs(m - t) for _, m, t in sorted(zip(std, mean, y, strict=True))]
    np.testing.assert_allclose(drawn.get_ydata(), naive, rtol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 40])
def test_the_running_mean_is_that_of_neighbours(window):
    error = predictions()[1]
    before, after = (window - 1) // 2, window // 2
    naive = [np.mean(error[max(0, i - before) : i + after + 1]) for i in range(40)]
    np.testing.assert_allclose(plots.running_mean(error, window), naive, rtol=1e-10)


@pytest.mark.parametrize(("n", "window"), [(3, 3), (40, 10), (400, 40)])
def test_gray_line_is_the_running_mean_of_a_tenth_but_not_below_ten(n, window):
    ax = plots.uncertainty_error(*predictions(n))
    expected = plots.running_mean(line(ax, "absolute error").get_ydata(), window)
    np.testing.assert_allclose(line(ax, f"running mean of {window}").get_ydata(), expected)


def test_dashed_lines_are_the_intervals_of_the_constant_std():
    low, high = dashed(plots.uncertainty_error(*predictions(), constant_std=1.5))
    np.testing.assert_allclose(low, Z50 * 1.5)
    np.testing.assert_allclose(high, Z95 * 1.5)
    assert not dashed(plots.uncertainty_error(*predictions()))


def test_one_far_error_does_not_flatten_the_plot_and_is_counted():
    mean, std, y = predictions(100)
    y[7], y[50] = 500.0, -300.0
    ax = plots.uncertainty_error(mean, std, y)
    assert ax.get_ylim()[1] < 10
    assert [text.get_text() for text in ax.texts] == [f"errors above: 2, largest {abs(500 - mean[7]):.3g}"]
    far = line(ax, "_above").get_xdata()
    order = np.argsort(std)
    assert sorted(order[far.astype(int) - 1]) == [7, 50]


def test_one_far_error_in_few_points_does_not_flatten_the_plot():
    mean, std, y = predictions(20)
    y[7] = 500.0
    assert plots.uncertainty_error(mean, std, y).get_ylim()[1] < 10


def test_without_far_errors_all_are_inside_the_axes():
    mean, std, y = predictions(100)
    ax = plots.uncertainty_error(mean, std, y)
    assert not ax.texts
    assert np.abs(mean - y).max() < ax.get_ylim()[1]


def test_perfect_and_sure_predictions_can_be_drawn():
    ax = plots.uncertainty_error([1.0, 2.0], [0.0, 0.0], [1.0, 2.0])
    assert ax.get_ylim() == (0.0, 1.0)


def test_toy_draws_data_mean_and_bands_in_the_order_of_x():
    rng = np.random.default_rng(0)
    x, y, grid = rng.normal(size=9), rng.normal(size=9), rng.permutation(np.linspace(-2, 2, 30))
    mean, std = np.sin(grid), 1 + grid**2
    ax = plots.toy(x, y, grid, mean, std, constant_std=0.5)
    at = np.sort(grid)
    np.testing.assert_array_equal(line(ax, "training data").get_xydata(), np.column_stack([x, y]))
    np.testing.assert_array_equal(line(ax, "predictive mean").get_xydata(), np.column_stack([at, np.sin(at)]))
    for label, z in (("50 % interval", Z50), ("95 % interval", Z95)):
        for side in (-1, 1):
            expected = np.sin(at) + side * z * (1 + at**2)
            np.testing.assert_allclose(band(ax, label, at, side), expected, rtol=1e-10)
    expected = [np.sin(at) + side * z * 0.5 for side in (-1, 1) for z in (Z50, Z95)]
    np.testing.assert_allclose(dashed(ax), expected, rtol=1e-10)
    assert not dashed(plots.toy(x, y, grid, mean, std))


def test_given_axes_are_drawn_into_and_returned():
    ax = Figure().add_subplot()
    assert plots.uncertainty_error(*predictions(), ax=ax) is ax
    assert plots.toy([0.0], [1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0], ax=ax) is ax
    assert ax.lines


def test_legend_has_one_entry_per_kind_and_axes_are_labelled(tmp_path):
    ax = plots.uncertainty_error(*predictions(), constant_std=1.0)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "95 % interval",
        "50 % interval",
        "constant std: 50 %, 95 %",
        "absolute error",
        "running mean of 10",
    ]
    assert "target units" in ax.get_ylabel()
    assert "std" in ax.get_xlabel()
    ax.figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_tensors_with_gradients_equal_arrays():
    arrays = predictions()
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays]
    drawn = [line(plots.uncertainty_error(*p), "absolute error").get_ydata() for p in (arrays, tensors)]
    np.testing.assert_array_equal(*drawn)


@pytest.mark.slow
def test_matplotlib_is_imported_late_and_pyplot_never():
    script = """
import sys
from mcbn import plots
assert "matplotlib" not in sys.modules, "imported too early"
plots.uncertainty_error([0.0, 1.0], [1.0, 1.0], [1.0, 1.0])
plots.toy([0.0], [1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0])
assert "matplotlib.pyplot" not in sys.modules, "pyplot imported"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_missing_matplotlib_names_the_extra(no_matplotlib):
    with pytest.raises(MCBNError, match=r"pip install 'mcbn\[plots\]'"):
        plots.uncertainty_error(*predictions())


@pytest.mark.parametrize(
    ("mean", "std", "y", "message"),
    [
        (np.zeros((4, 1)), np.ones(4), np.zeros(4), r"mean \(4, 1\), std \(4,\)"),
        (np.zeros(3), np.ones(4), np.zeros(4), r"mean \(3,\), std \(4,\)"),
        (np.zeros(0), np.ones(0), np.zeros(0), r"\(0,\)"),
        (1.0, 1.0, 1.0, r"\(\)"),
        (np.zeros(2), np.array([1.0, -1.0]), np.zeros(2), "negative"),
        (np.zeros(2), np.array([1.0, np.nan]), np.zeros(2), "std holds NaN"),
        (np.zeros(2), np.ones(2), np.array([1.0, np.inf]), "y holds NaN or infinity"),
        ("ab", np.ones(2), np.zeros(2), "mean must be a vector of numbers"),
    ],
)
def test_bad_predictions_are_refused(mean, std, y, message):
    with pytest.raises(MCBNError, match=message):
        plots.uncertainty_error(mean, std, y)
    if np.shape(mean) == np.shape(std):
        with pytest.raises(MCBNError):
            plots.toy([0.0], [0.0], y, mean, std)


@pytest.mark.parametrize("constant_std", [-1.0, np.nan])
def test_a_bad_constant_std_is_refused(constant_std):
    with pytest.raises(MCBNError, match="constant_std"):
        plots.uncertainty_error(*predictions(), constant_std=constant_std)


def test_toy_refuses_training_points_of_two_lengths():
    with pytest.raises(MCBNError, match=r"x_train \(2,\), y_train \(3,\)"):
        plots.toy(np.zeros(2), np.zeros(3), np.zeros(4), np.zeros(4), np.ones(4))


def test_statistics_is_a_density_histogram_under_the_two_gaussians():
    drawn = np.random.default_rng(0).normal(2.0, 0.5, 400)
    ax = plots.statistics(drawn, 2.1, 0.4, xlabel="batch std")
    heights, edges = np.histogram(drawn, bins=20, density=True)
    np.testing.assert_allclose([patch.get_height() for patch in ax.patches], heights, rtol=1e-10)
    np.testing.assert_allclose([patch.get_x() for patch in ax.patches], edges[:-1], rtol=1e-10)
    for label, mean, std in (
        ("analytic Gaussian", 2.1, 0.4),
        ("Gaussian of their moments", drawn.mean(), drawn.std()),
    ):
        x, y = line(ax, label).get_data()
        np.testing.assert_allclose(y, stats.norm.pdf(x, mean, std), rtol=1e-10)
        assert x[0] <= min(drawn.min(), mean - 3 * std)
        assert x[-1] >= max(drawn.max(), mean + 3 * std)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch std", "density")


def test_statistics_without_an_analytic_gaussian_and_into_given_axes():
    ax = Figure().add_subplot()
    assert plots.statistics([1.0, 2.0, 4.0], ax=ax) is ax
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"Gaussian of their moments", "drawn batches"}


@pytest.mark.parametrize(
    ("drawn", "mean", "std", "message"),
    [
        (np.zeros((4, 2)), None, None, r"drawn \(4, 2\)"),
        (np.ones(5), None, None, "does not vary"),
        (np.arange(5), 0.0, None, "mean and a positive std, or neither"),
        (np.arange(5), 0.0, 0.0, "mean and a positive std, or neither"),
        (np.array([0.0, np.nan]), None, None, "drawn holds NaN"),
    ],
)
def test_statistics_refuses_what_cannot_be_drawn(drawn, mean, std, message):
    with pytest.raises(MCBNError, match=message):
        plots.statistics(drawn, mean, std)
