"""What the paper derives about batch statistics: found here where mcbn-study, which holds it, is installed."""

from mcbn.plugins import moved_names

_MOVED = """
    ObjectiveGap Prior StatisticMoments activation_moments analytic_moments implied_prior kl_derivative kl_gaussian
    kl_regularizer kolmogorov_smirnov ks_distance ks_pvalue lilliefors objective_gap statistic_moments
"""
__getattr__ = moved_names(__name__, *_MOVED.split())
