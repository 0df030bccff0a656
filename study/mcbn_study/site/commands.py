"""What `mcbn report` runs."""

from pathlib import Path

from mcbn_study.site.write import site


def report(results: Path = Path("results"), out: Path = Path("site"), benchmarks: Path | None = None) -> Path:
    """Write the reproduction as a static site and return its way in, out/index.html."""
    return site(results, out, benchmarks=benchmarks)[0]
