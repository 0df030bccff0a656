"""`python -m mcbn.playground`."""

import argparse
import sys

from mcbn.errors import MCBNError
from mcbn.playground.server import main

parser = argparse.ArgumentParser(prog="python -m mcbn.playground", description=main.__doc__)
parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
parser.add_argument("--no-browser", action="store_true", help="only print the address")
options = parser.parse_args()
try:
    main(options.port, browser=not options.no_browser)
except MCBNError as error:
    sys.exit(f"mcbn: {error}")
