"""The README's code runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_first_call_runs_within_25_lines(capsys) -> None:  # type: ignore[no-untyped-def]
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len(block.splitlines()) <= 25
    exec(compile(block, "README.md", "exec"), {})
    covered = float(re.search(r"interval: tensor\((.*)\)", capsys.readouterr().out).group(1))  # type: ignore[union-attr]
    assert 0.8 < covered <= 1
