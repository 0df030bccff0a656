"""`python -m mcbn_benchmarks COMMAND`."""

from mcbn_benchmarks.commands import app

if __name__ == "__main__":
    app(prog_name="python -m mcbn_benchmarks")
