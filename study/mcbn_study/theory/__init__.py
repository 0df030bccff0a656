"""What the paper derives about batch statistics, as code (Teye et al. 2018, section 3.3, appendix 1.2 to 1.4)."""

from mcbn.check.diagnosis import ks_distance, lilliefors
from mcbn.diagonal import StatisticMoments, statistic_moments
from mcbn_study.theory.gaussians import (
    Prior,
    activation_moments,
    analytic_moments,
    implied_prior,
    kl_derivative,
    kl_gaussian,
    kolmogorov_smirnov,
    ks_pvalue,
)
from mcbn_study.theory.objective import ObjectiveGap, kl_regularizer, objective_gap

__all__ = [
    "ObjectiveGap",
    "Prior",
    "StatisticMoments",
    "activation_moments",
    "analytic_moments",
    "implied_prior",
    "kl_derivative",
    "kl_gaussian",
    "kl_regularizer",
    "kolmogorov_smirnov",
    "ks_distance",
    "ks_pvalue",
    "lilliefors",
    "objective_gap",
    "statistic_moments",
]
