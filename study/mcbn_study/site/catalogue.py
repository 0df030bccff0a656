"""Every table and figure of Teye et al. 2018: where the paper has it, and where it stands in the reproduction."""

from typing import NamedTuple


class Item(NamedTuple):
    """One table or figure.

    Attributes:
        where: as the paper numbers it.
        what: what it shows.
        study: the study that makes it; empty for what has none yet.
        page: of the site; empty where there is none.
        anchor: on that page; for tables the label of the paper.
        printed: what the paper's own looks like, in words, for figures and for what was not run.
    """

    where: str
    what: str
    study: str = ""
    page: str = ""
    anchor: str = ""
    printed: str = ""


_ERRORS = "Uncertainty-error plots"
_AS_FIGURE_2 = "As Figure 2, left."
_HISTOGRAMS = "Histograms close to their analytic Gaussians, for epochs and batch sizes."
FURTHER = "Not in the paper"

ITEMS = (
    Item("Figure 1", "Toy problem: mean, MCBN bands, constant uncertainty", "toy", "figures.html", "toy",
         "Bands narrow on the points and wide between and beyond them; dashes of constant uncertainty."),
    Item("Table 1", "Uncertainty quality on eight sets", "regression", "regression.html", "table:main_results"),
    Item("Figure 2, left", _ERRORS, "regression", "figures.html", "mcbn",
         "Bands of MCBN (blue), MNF (violet) and MCDO (red) that mostly rise with the running mean of the errors."),
    Item("Figure 2, right", "Segmentation and its uncertainty, Bayesian SegNet", "segmentation", "segmentation.html",
         "top", "CamVid pictures"),
    Item("Table 2", "CIFAR-10, ResNet-32: PLL over the number of passes", "cifar10", "cifar10.html",
         "table:cifar_results", "PLL -.36 at T = 1 to -.28 at T = 128; softmax baseline -.32"),
    Item("Appendix, statistics test", "Are batch statistics Gaussian?", "statistics", "statistics.html", "table",
         "Histograms of a mean and of a variance under their Gaussians, with Kolmogorov-Smirnov tests."),
    Item("Appendix, data sets", "Sizes of the regression sets", "data", "regression.html", "table:datasets"),
    Item("Appendix, CRPS", "Normalised CRPS with p-values", "regression", "regression.html", "table:crps_results"),
    Item("Appendix, PLL", "Normalised PLL with p-values", "regression", "regression.html", "table:pll_results"),
    Item("Appendix, raw scores", "Raw CRPS and PLL", "regression", "regression.html", "table:rawcrpspll"),
    Item("Appendix, RMSE", "RMSE", "regression", "regression.html", "table:rmse_results"),
    Item("Appendix, uncertainty-error A", f"{_ERRORS}: Boston, Concrete, Energy, Kin8nm", "regression", "figures.html",
         "mcbn", _AS_FIGURE_2),
    Item("Appendix, uncertainty-error B", f"{_ERRORS}: Power, Protein, Wine, Yacht", "regression", "figures.html",
         "mcbn", _AS_FIGURE_2),
    Item("Appendix, batch size, CRPS", "CRPS over M", "sensitivity", "sensitivity.html", "table:batch_size_CRPS"),
    Item("Appendix, batch size, PLL", "PLL over M", "sensitivity", "sensitivity.html", "table:batch_size_PLL"),
    Item("Appendix, passes, CRPS", "CRPS over T", "sensitivity", "sensitivity.html", "table:forward_pass_CRPS"),
    Item("Appendix, passes, PLL", "PLL over T", "sensitivity", "sensitivity.html", "table:forward_pass_PLL"),
    Item("Appendix, segmentation", "PASCAL VOC and CamVid pictures", "segmentation", "segmentation.html", "pictures",
         "input, segmentation and uncertainty"),
    Item("Appendix, batch means", "Distribution of batch means", "statistics", "statistics.html", "mean", _HISTOGRAMS),
    Item("Appendix, batch stds", "Distribution of batch standard deviations", "statistics", "statistics.html", "std",
         _HISTOGRAMS),
    Item(FURTHER, "Gradients of Eq. (1) and Eq. (2) as N grows", "objective", "theory.html", "objective"),
    Item(FURTHER, "Training with the KL regulariser", "regularizer", "theory.html", "regularizer"),
    Item(FURTHER, "Speed", "speed", "speed.html", "cpu"),
)  # fmt: skip

STUDIES = ("regression", "sensitivity", "statistics", "objective", "regularizer")  # each with a page of its own making
FOLDERS = {  # shown as they are: their Markdown, pictures and records
    "cifar10": "CIFAR-10",
    "segmentation": "Segmentation",
    "alternatives": "What else one could use",
    "foreign": "Networks that others trained",
    "zoo": "Networks of other packages",
    "posteriors": "Families of posteriors",
}
THEORY = {"objective": "Gradients of Eq. (1) and Eq. (2)", "regularizer": "Training with the KL regulariser"}
SPEED = {"cpu": "Speed on a CPU", "cuda": "Speed on a GPU"}
OTHERS = {"speed": "mcbn bench", "zoo": "make zoo", "foreign": "python examples/foreign_network.py"}
COMMANDS = {study: f"mcbn reproduce {study}" for study in ("toy", *STUDIES, *FOLDERS)} | OTHERS
PAGES = {
    "index.html": "Overview",
    "regression.html": "Regression tables",
    "figures.html": "Figures",
    "sensitivity.html": "Sensitivity",
    "statistics.html": "Batch statistics",
    "theory.html": "Theory",
    "speed.html": "Speed",
}
