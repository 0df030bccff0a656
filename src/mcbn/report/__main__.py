"""`python -m mcbn.report results --out site`."""

import argparse
import sys
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn.report.commands import report

parser = argparse.ArgumentParser(prog="python -m mcbn.report", description=report.__doc__)
parser.add_argument("results", type=Path, nargs="?", default=Path("results"), help="folder of records")
parser.add_argument("--out", type=Path, default=Path("site"), help="folder of the site (default: site)")
parser.add_argument(
    "--benchmarks", type=Path, help="folder of speed tables (default: benchmarks/results beside results)"
)
options = parser.parse_args()
try:
    print(report(options.results, options.out, options.benchmarks))
except MCBNError as error:
    sys.exit(f"mcbn: {error}")
