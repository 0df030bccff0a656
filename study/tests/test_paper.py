"""The printed numbers: all of them, found where they are printed."""

from mcbn.data import NAMES
from mcbn_study import paper
from mcbn_study.regression import report as summary


def test_printed_numbers_are_complete():
    by_table = {}
    for number in paper.numbers():
        by_table.setdefault(number.table, []).append(number)
    assert {table: len(found) for table, found in by_table.items()} == {
        "table:crps_results": 24,
        "table:pll_results": 24,
        "table:rawcrpspll": 48,
        "table:rmse_results": 40,
        "table:batch_size_CRPS": 58,
        "table:batch_size_PLL": 58,
        "table:forward_pass_CRPS": 24,
        "table:forward_pass_PLL": 24,
        "table:cifar_results": 9,
    }
    regression = [number for number in paper.numbers() if number.dataset != "cifar10"]
    assert {n.dataset for n in regression} == set(NAMES)
    assert {n.method for n in regression} <= set(summary.METHODS)
    assert {n.metric for n in regression} <= set(summary.METRICS)


def test_printed_numbers_are_found_by_table_where_two_share_a_setting():
    by_size = paper.find_sensitivity("table:batch_size_CRPS", "boston", "crps_normalized", 128, 100)
    by_passes = paper.find_sensitivity("table:forward_pass_CRPS", "boston", "crps_normalized", 128, 100)
    assert (by_size.mean, by_passes.mean, by_size.decimals) == (2.5, 2.7, 1)
    kin8nm = paper.find("kin8nm", "bn", "rmse")
    assert (kin8nm.mean, kin8nm.standard_error, kin8nm.half_unit) == (0.07, 0.0, 0.005)
    assert paper.find("boston", "ensemble", "rmse") is None
