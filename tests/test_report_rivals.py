"""Who is better than MCBN, said from records."""

from mcbn.report import rivals


def test_the_verdict_names_each_rival_and_by_how_much_it_is_better_or_worse():
    def row(method, seed, data, nll, tempered=False):
        base = {"kind": "score", "method": method, "seed": seed, "data": data, "tempered": tempered, "tau": 1.0}
        return base | {"nll": nll, "n": 10, "config": {"n_samples": 1, "batch_size": 2}, "chosen_batch_size": None}

    found = [row("mcbn", 1, d, 0.3) for d in ("validation", "test")]
    found += [row(m, s, "test", v) for m, s, v in (("plain", 1, 0.4), ("ensemble", None, 0.2), ("laplace", 1, 0.25))]
    said = rivals.verdict(rivals.Results(found))
    assert (
        "- NLL: better are Last-layer Laplace (by 0.0500); Deep ensemble (by 0.1000). Worse: Softmax (by 0.1000)."
        in said
    )
    found += [row("mcbn", 2, d, 0.5) for d in ("validation", "test")] + [row("laplace", 2, "test", 0.43)]
    said = rivals.verdict(rivals.Results(found))  # gaps of 0.05 and 0.07, each within its seed
    assert "- NLL: better are Last-layer Laplace (by 0.0600 ± 0.0100); Deep ensemble (by 0.2000)." in said
    for r in found:
        r["nll"] = 0.1 if r["method"] == "mcbn" else r["nll"]
    assert "- NLL: no alternative is better. Worse: Softmax (by 0.3000);" in rivals.verdict(rivals.Results(found))
    found += [row("thinned_mcbn", 1, d, 0.3) for d in ("validation", "test")] + [row("thinned_plain", 1, "test", 0.2)]
    said = rivals.verdict(rivals.Results(found))  # each kind of network has its own best mode and rivals
    assert said.count("- NLL: no alternative is better.") == 1
    assert said.endswith("- NLL: better are Softmax, dropout network (by 0.1000).")
