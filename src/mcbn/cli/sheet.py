"""The score sheet of `mcbn evaluate`, for people and for machines."""

import json
import math
from typing import Any

import torch

from mcbn.model import MCBN
from mcbn.tables.scoring import Evaluation

NAMES = {
    "rmse": "RMSE",
    "crps": "CRPS",
    "pll": "PLL",
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "error_auroc": "AUROC of errors",
}
HIGHER_IS_BETTER = ("pll", "accuracy", "error_auroc")
TWINS = {"regression": "constant twin", "classification": "plain network"}
ITSELF = "the scored data itself, so it is the best constant there"


def gather(
    bayes: MCBN[Any], scores: Evaluation, *, data: str, n_samples: int | None, tuned_on: str | None
) -> dict[str, Any]:
    """Put scores and what they were made with into one nest of plain values; what does not exist is None."""
    regression = bayes.task == "regression"
    report = {
        "data": data,
        "task": bayes.task,
        "n_points": scores.n_points,
        "n_samples": n_samples or bayes.posterior.n_samples,
        "batch_size": bayes.posterior.batch_size,
        "tau": torch.as_tensor(bayes.tau).tolist(),
        "mcbn": scores.mcbn,
        "constant" if regression else "plain": scores.twin,
    }
    if regression:
        report["normalized_percent"] = scores.normalized
        report["coverage"] = {f"{level:g}": share for level, share in scores.coverage.items()}
        report["constant_tau"], report["constant_tau_tuned_on"] = scores.constant_tau, tuned_on or ITSELF
    return report


def as_json(report: dict[str, Any]) -> str:
    """Write one line of JSON; infinite scores become null."""
    return json.dumps(_finite(report), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(report: dict[str, Any]) -> str:
    """Lay the scores out as a table."""
    twin, percent = report.get("constant") or report["plain"], report.get("normalized_percent", {})
    head = f"{report['task']} on {report['n_points']} points of {report['data']}, "
    lines = [head + f"T = {report['n_samples']}, M = {report['batch_size']}, tau = {number(report['tau'])}", ""]
    lines.append(f"{'':36}{'MCBN':>12}{TWINS[report['task']]:>16}" + (f"{'normalised %':>16}" if percent else ""))
    for key, score in report["mcbn"].items():
        title = f"{NAMES[key]} ({'higher' if key in HIGHER_IS_BETTER else 'lower'} is better)"
        share = f"{number(percent[key]):>16}" if key in percent else ""
        lines.append(f"{title:36}{number(score):>12}{number(twin[key]):>16}{share}")
    for level, share in report.get("coverage", {}).items():
        lines.append(f"{f'inside the {100 * float(level):g} % interval':36}{f'{100 * share:.1f} %':>12}")
    if "constant_tau" in report:
        tau = number(report["constant_tau"])
        lines += ["", f"constant twin: same mean, tau = {tau}, tuned on {report['constant_tau_tuned_on']}"]
    return "\n".join(lines)


def number(value: float | list[float] | None) -> str:
    """Write with four digits; a dash stands for what does not exist."""
    if isinstance(value, list):
        return ", ".join(map(number, value))
    return "-" if value is None else f"{value:.4g}"


def describe_tau(bayes: MCBN[Any]) -> str:
    """Say what the noise or temperature is, and how to come by one."""
    tau = torch.as_tensor(bayes.tau)
    if bool(torch.isinf(tau).any()):
        return "no noise precision yet: give held-out data by --tune"
    return f"tau = {number(tau.tolist())}"
