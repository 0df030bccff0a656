"""Who is better than MCBN, said from records."""

from mcbn_study.alternatives import report as alternatives
from mcbn_study.tables import MISSING


def row(method, seed, data, nll, tempered=False):
    base = {"kind": "score", "method": method, "seed": seed, "data": data, "tempered": tempered, "tau": 1.0}
    return base | {"nll": nll, "n": 10, "config": {"n_samples": 1, "batch_size": 2}, "chosen_batch_size": None}


def test_the_best_mode_takes_the_time_of_the_modes_it_was_chosen_from():
    def times(**milliseconds):
        costs = [
            {"kind": "cost", "method": m, "seed": 1, "milliseconds": v, "device": "cpu", "hardware": "2 cores"}
            for m, v in milliseconds.items()
        ]
        results = alternatives.Results(found + costs)
        return {alternatives.NAMES[method]: results.milliseconds(method) for method in results.shown}

    found = [row("mcbn", 1, d, 0.3) for d in ("validation", "test")]
    found += [row("mcbn_linear", 1, d, 0.4) for d in ("validation", "test")]
    assert times(mcbn=2.0, mcbn_linear=7.0) == {"MCBN": "2", "MCBN linear": "7", "MCBN, best mode": "2"}
    found += [row("mcbn", 2, d, 0.3) for d in ("validation", "test")]
    found += [row("mcbn_linear", 2, d, 0.2) for d in ("validation", "test")]
    assert times(mcbn=2.0, mcbn_linear=7.0)["MCBN, best mode"] == "4.5"
    assert times(mcbn=2.0)["MCBN, best mode"] == MISSING


def test_the_verdict_names_each_rival_and_by_how_much_it_is_better_or_worse():
    found = [row("mcbn", 1, d, 0.3) for d in ("validation", "test")]
    found += [row(m, s, "test", v) for m, s, v in (("plain", 1, 0.4), ("ensemble", None, 0.2), ("laplace", 1, 0.25))]
    said = alternatives.verdict(alternatives.Results(found))
    assert (
        "- NLL: better are Last-layer Laplace (by 0.0500); Deep ensemble (by 0.1000). Worse: Softmax (by 0.1000)."
        in said
    )
    found += [row("mcbn", 2, d, 0.5) for d in ("validation", "test")] + [row("laplace", 2, "test", 0.43)]
    said = alternatives.verdict(alternatives.Results(found))  # gaps of 0.05 and 0.07, each within its seed
    laplace, ensemble = "Last-layer Laplace (by 0.0600 ± 0.0100)", "Deep ensemble (by 0.2000 ± 0.1000)"
    assert f"- NLL: no alternative is better. Level: {laplace}; {ensemble}. Worse: Softmax" in said
    found += [row("mcbn", 3, d, 0.4) for d in ("validation", "test")] + [row("laplace", 3, "test", 0.34)]
    said = alternatives.verdict(alternatives.Results(found))  # three seeds tell 0.06 ± 0.006 from nothing
    assert "- NLL: better are Last-layer Laplace (by 0.0600 ± 0.0058). Level: Deep ensemble" in said
    for r in found:
        r["nll"] = 0.1 if r["method"] == "mcbn" else r["nll"]
    said = alternatives.verdict(alternatives.Results(found))
    assert "- NLL: no alternative is better. Worse: Softmax (by 0.3000); Last-layer Laplace" in said
    found += [row("thinned_mcbn", 1, d, 0.3) for d in ("validation", "test")] + [row("thinned_plain", 1, "test", 0.2)]
    said = alternatives.verdict(alternatives.Results(found))  # each kind of network has its own best mode and rivals
    assert said.count("- NLL: no alternative is better.") == 1
    assert said.endswith("- NLL: better are Softmax, dropout network (by 0.1000).")
