"""`python -m mcbn_benchmarks COMMAND`."""

from mcbn.cli import show_whole_sentences
from mcbn_benchmarks import fresh, gpu, pages, ray, sweep, trainer
from mcbn_benchmarks.commands import app, command

for lines in (pages.pages, gpu.narrow, pages.costs):
    command(lines)
for records in (fresh.first, fresh.memory, gpu.chunks, gpu.constants, ray.ray, sweep.sweep, trainer.trainer):
    command(records, kept=True)
show_whole_sentences(app)

if __name__ == "__main__":
    app(prog_name="python -m mcbn_benchmarks")
