"""`python -m mcbn`: the command line."""

from mcbn.cli import app

app(prog_name="mcbn")
