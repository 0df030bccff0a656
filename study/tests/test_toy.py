import numpy as np
import pytest

from mcbn import demo
from mcbn_study.regression import figures


@pytest.mark.filterwarnings("ignore:mcbn. the noise stopped")  # 30 epochs leave the draws wide
def test_toy_is_saved_as_its_figure_reads_it(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "TOY", demo.Setting(demo.TOY.batch_size, demo.TOY.weight_decay, 30))
    (path,) = figures.toy(tmp_path)
    arrays = np.load(path)
    assert arrays["mean"].shape == arrays["std"].shape == arrays["x_grid"].shape == (400,)
    assert arrays["x_train"].shape == arrays["y_train"].shape == (100,)
    assert arrays["constant_std"] > 0
    assert (arrays["std"] > 0).all()
    assert figures.write_figures(path.parent, tmp_path / "figures") == [tmp_path / "figures" / "toy.png"]
