import csv
import io

import numpy as np
import pytest
from scipy import stats

import synthetic
from mcbn.data import NAMES
from mcbn.errors import MCBNError
from mcbn_study import journal
from mcbn_study.regression import report


@pytest.fixture(scope="module")
def tests():
    return list(synthetic.study())


def naive(tests, dataset, method, field):
    return [r[field] for r in tests if (r["dataset"], r["method"]) == (dataset, method)]


def test_every_row_equals_numpy_and_scipy_over_its_runs(tests):
    rows = report.summarise(tests)
    fields = {("cubn", "crps"): "crps_constant", ("cubn", "pll"): "pll_constant"}
    fields |= {("cudo", metric): field for (_, metric), field in fields.items()}
    source = {"cubn": "mcbn", "cudo": "mcdo"}
    for (dataset, method, metric), row in rows.items():
        values = naive(tests, dataset, source.get(method, method), fields.get((method, metric), metric))
        assert row.n == len(values) == (5 if method == "ensemble" else 25)
        assert row.mean == pytest.approx(np.mean(values), rel=1e-12)
        assert row.standard_error == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), rel=1e-10)
        if metric.endswith("_normalized"):
            assert row.p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-8)
        else:
            assert row.p_value is None


def test_rows_cover_what_was_run_and_nothing_else(tests):
    rows = report.summarise(tests)
    without_normalised = {"bn", "do", "cubn", "cudo"}
    expected = [
        (d, method, metric)
        for d in NAMES
        for method in report.METHODS
        for metric in report.METRICS
        if not (metric.endswith("_normalized") and method in without_normalised)
    ]
    assert list(rows) == expected


def test_csv_has_the_columns_and_the_papers_numbers(tests):
    text = report.summary_csv(report.summarise(tests))
    assert text.splitlines()[0] == (
        "dataset,method,metric,n,mean,standard_error,p_value,searches,search,paper_mean,paper_standard_error"
    )
    rows = {(r["dataset"], r["method"], r["metric"]): r for r in csv.DictReader(io.StringIO(text))}
    yacht = rows["yacht", "mcbn", "crps_normalized"]
    assert (float(yacht["paper_mean"]), float(yacht["paper_standard_error"])) == (-56.39, 14.27)
    assert rows["boston", "cubn", "crps"]["paper_mean"] == rows["boston", "mcbn", "crps"]["p_value"] == ""
    for key, row in report.summarise(tests).items():
        assert float(rows[key]["mean"]) == pytest.approx(row.mean, rel=1e-9)


def test_the_order_of_records_does_not_matter(tests):
    shuffled = [tests[i] for i in np.random.default_rng(3).permutation(len(tests))]
    assert report.summary_csv(report.summarise(shuffled)) == report.summary_csv(report.summarise(tests))


def test_null_scores_are_left_out_and_show_in_n(tests):
    first = {**tests[0], "pll_normalized": None}
    row = report.summarise([first, *tests[1:]])["boston", "mcbn", "pll_normalized"]
    assert row.n == 24
    assert row.mean == pytest.approx(np.mean(naive(tests, "boston", "mcbn", "pll_normalized")[1:]))


def test_one_run_has_neither_error_nor_p_value(tests):
    row = report.summarise(tests[:1])["boston", "mcbn", "crps_normalized"]
    assert (row.n, row.standard_error, row.p_value) == (1, None, None)


def test_other_kinds_are_no_runs(tests):
    assert report.runs([{"kind": "selection", "dataset": "boston"}, *tests[:3]]) == tests[:3]


def test_the_same_configuration_again_counts_once_the_last_time(tests):
    again = {**tests[1], "rmse": 77.0}
    found = report.runs([*tests[:3], again])
    assert sorted(record["rmse"] for record in found) == sorted([tests[0]["rmse"], tests[2]["rmse"], 77.0])


def test_another_configuration_of_the_same_run_is_an_error_that_names_it(tests):
    other = {**tests[1], "config_hash": "b2"}
    with pytest.raises(MCBNError, match=r"different configurations: dataset boston, method mcbn, split 1, seed 2;"):
        report.runs([*tests[:3], other])


def test_sensitivity_runs_differ_by_their_settings():
    records = list(synthetic.sensitivity(["boston"]))
    assert report.runs(records, kind="sensitivity", apart=("method", "batch_size", "n_samples")) == records
    with pytest.raises(MCBNError, match="method mcbn, batch_size 8, n_samples 100, split 1, seed 1"):
        report.runs(
            [*records, {**records[0], "config_hash": "b2"}],
            kind="sensitivity",
            apart=("method", "batch_size", "n_samples"),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "bosten"}, "'bosten'"),
        ({"method": "mcbn2"}, "'mcbn2'"),
        ({"rmse": "2.75"}, "rmse should be a number or null, not '2.75'"),
        ({"crps": True}, "crps should be a number"),
    ],
)
def test_bad_records_are_refused(tests, change, message):
    with pytest.raises(MCBNError, match=message):
        report.summarise(report.runs([{**tests[0], **change}]))


@pytest.mark.parametrize("field", ["seed", "rmse", "crps_constant"])
def test_a_record_that_lacks_a_field_is_named(tests, field, tmp_path):
    record = {name: value for name, value in tests[0].items() if name != field}
    journal.extend(tmp_path / "records.jsonl", [tests[1], record])
    with pytest.raises(MCBNError, match=f"records.jsonl, line 2: the record has no '{field}'"):
        report.summarise(report.runs(journal.read(tmp_path / "records.jsonl")))
