"""The snippets of docs/ecosystem.md run as they stand."""

import re

import pytest
import torch

from snippets import DOCS, blocks

SECTIONS = re.findall(r"## (.*?)\n.*?```python\n", (DOCS / "ecosystem.md").read_text(), re.DOTALL)


def test_every_section_has_a_snippet():
    assert SECTIONS == ["PyTorch", "scikit-learn", "torchmetrics", "Lightning"]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(("name", "code"), [*zip(SECTIONS, blocks("ecosystem.md"), strict=True)], ids=SECTIONS)
def test_snippet_runs(name, code, capsys):
    pytest.importorskip({"PyTorch": "torch", "scikit-learn": "sklearn"}.get(name, name.lower()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(code, {"__name__": "snippet"})
    printed = capsys.readouterr().out
    expected = {
        "PyTorch": "tensor(",
        "scikit-learn": "accuracy:",
        "torchmetrics": "normalised:",
        "Lightning": r"torch.Size([16, 1])",
    }
    assert expected[name] in printed
    if name == "scikit-learn":
        covered, accuracy, rare = (float(number) for number in re.findall(r": (\S+)", printed))
        assert covered > 0.7
        assert accuracy > 0.8
        assert rare > 0.8
