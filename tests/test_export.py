"""Exported predictors: onnxruntime gives the numbers of `predict`, for any batch, without mcbn or torch."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mcbn
from kinds import make, scramble, settle
from mcbn import export
from mcbn.export import tracing
from mcbn_study.networks import UNet, cifar_resnet
from untouched import untouched

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
DOCS = Path(__file__).parents[1] / "docs" / "serving.md"


def served(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    """Run a file with onnxruntime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {o.name: torch.from_numpy(r) for o, r in zip(session.get_outputs(), results, strict=True)}


def operators(graph: Any) -> list[str]:
    """List the operators of a graph, those of its loops too."""
    own = [node.op_type for node in graph.node]
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return own + [name for body in bodies for name in operators(body)]


def assert_same(found: dict[str, Tensor], pred: Any, rtol: float = 1e-4) -> None:
    """Compare every output with its own scale."""
    names = ("mean", "variance", "epistemic") if hasattr(pred, "mean") else ("probs", "entropy", "mutual_information")
    assert tuple(found) == names
    for name, value in found.items():
        expected = getattr(pred, name)
        atol = 0.01 * rtol * expected.abs().max().item()
        torch.testing.assert_close(value, expected, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def fitted(task: str, *, dtype: torch.dtype = torch.float64, T: int = 12, **options: Any) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make("1d", dtype=dtype)
    bayes = mcbn.MCBN(model, task).fit(x, n_samples=T, batch_size=8, **options)
    bayes.tau = 3.0
    return bayes, x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("regression", {}),
        ("regression", {"chunk_size": 5, "n_samples": 10}),
        ("classification", {"chunk_size": 1}),
        ("regression", {"method": "linear"}),
    ],
)
def test_mlp_equals_predict_for_any_batch(tmp_path: Path, task: str, options: dict[str, Any]) -> None:
    bayes, x = fitted(task)
    with untouched(bayes.model):
        bayes.export(tmp_path / "net.onnx", x[:4], **options)
    wanted = {name: value for name, value in options.items() if name != "chunk_size"}
    for n in (1, 2, 9):
        assert_same(served(tmp_path / "net.onnx", x=x[:n]), bayes.predict(x[:n], **wanted), rtol=1e-8)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert ("Scan" in operators(graph)) == ("chunk_size" in options)
    assert not RANDOM & set(operators(graph))
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.slow
def test_file_holds_the_draws_and_nothing_of_the_data_or_the_machine(tmp_path: Path) -> None:
    bayes, x = fitted("regression", dtype=torch.float32)
    bayes.tau = torch.tensor([2.0, 4.0])
    path = tmp_path / "net.onnx"
    bayes.export(path, x[0:1])  # a single input still leaves the batch open
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}
    weights = sum(parameter.numel() for parameter in bayes.model.parameters())
    draws = 12 * 2 * sum(part.shape[1] for part in bayes.posterior.mean.values())
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert sum(int(np.prod(t.dims)) for t in floats) <= weights + draws + 16
    content = path.read_bytes()
    assert b".py" not in content
    assert str(Path.cwd()).encode() not in content
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert found == {
        "mcbn_version": mcbn.__version__,
        "task": "regression",
        "method": "sample",
        "tau": "[2.0, 4.0]",
        "n_samples": "12",
        "batch_size": "8",
        "posterior": "sample",
    }
    ends = [*model.graph.input, *model.graph.output]
    assert [v.name for v in ends] == ["x", "mean", "variance", "epistemic"]
    assert [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in ends] == [
        ["batch", 5],
        *[["batch", 2]] * 3,
    ]
    result, samples = served(path, x=x), bayes.sample(x)  # (T, N, D)
    torch.testing.assert_close(result["mean"], samples.mean(0))
    torch.testing.assert_close(result["epistemic"], samples.var(0, correction=0), rtol=1e-4, atol=1e-6)
    noise = torch.tensor([0.5, 0.25]).expand(len(x), 2)
    torch.testing.assert_close(result["variance"] - result["epistemic"], noise, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["layerwise", "diagonal"])
def test_linear_of_a_gaussian_posterior_equals_predict(family: str) -> None:
    bayes, x = fitted("regression", posterior=family)
    program = export.to_torch_export(bayes, x[:3], method="linear")
    assert_same(program.module()(x[:7]), bayes.predict(x[:7], method="linear"), rtol=1e-8)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)), inplace=True)))


class MBConv(nn.Module):
    """Inverted bottleneck with squeeze and excitation, in the manner of EfficientNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.SiLU(inplace=True), SqueezeExcite(wide)),
            *(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


def efficientnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True)]
    blocks = [MBConv(8, 8, 1), MBConv(8, 12, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 5)]
    return nn.Sequential(*stem, *blocks, *head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "size", "options"),
    [
        (lambda: cifar_resnet(5), 16, {}),
        (UNet, 16, {}),
        (efficientnet, 16, {"chunk_size": 2}),
        (efficientnet, 16, {"method": "linear"}),
    ],
    ids=["resnet32", "unet", "efficientnet-loop", "efficientnet-linear"],
)
def test_convolutional_networks_equal_predict(tmp_path: Path, network: Any, size: int, options: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = network(), torch.randn(24, 3, size, size)
    settle(model, x)
    bayes = mcbn.MCBN(model, "classification").fit(x, n_samples=4, batch_size=8)
    with untouched(model):
        bayes.export(tmp_path / "net.onnx", x[:2], **options)
    wanted = {name: value for name, value in options.items() if name != "chunk_size"}
    for n in (1, 3):
        assert_same(served(tmp_path / "net.onnx", x=x[:n]), bayes.predict(x[:n], **wanted))


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_torch_export_equals_predict(method: str) -> None:
    bayes, x = fitted("regression")
    program = export.to_torch_export(bayes, x[:3], method=method)
    assert isinstance(program, torch.export.ExportedProgram)
    for n in (2, 11):
        assert_same(program.module()(x[:n]), bayes.predict(x[:n], method=method), rtol=1e-8)


def test_layers_before_the_first_stochastic_one_run_once_for_all_draws() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression", layers=["4"]).fit(x, n_samples=6, batch_size=8)
    network, names = bayes.engine.network, ["4"]
    rows = [torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)]
    program = tracing.trace_open(network, x[:3], names, rows)
    counts = [str(part.graph).count("aten.linear") for part in (program.shared, program.each)]
    assert counts == [2, 1]
    program = export.to_torch_export(bayes, x[:3])
    assert_same(program.module()(x), bayes.predict(x), rtol=1e-8)


class Windows(nn.Module):
    """Pooling, a transposed convolution and strides that leave a row out."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.BatchNorm2d(4), *middle)
        self.last = nn.Sequential(nn.Conv2d(4, 3, 3, 2, padding=1, groups=1), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)).mean((2, 3))


@pytest.mark.slow
def test_gradients_of_windows_equal_predict() -> None:
    parts = nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(4, 4, 3, 2), nn.AvgPool2d(2, 1, padding=1)
    model, x = Windows(*parts).double(), torch.randn(24, 3, 11, 11, generator=torch.Generator().manual_seed(0)).double()
    scramble(model)
    settle(model, x)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
    program = export.to_torch_export(bayes, x[:2], method="linear")
    assert_same(program.module()(x[:5]), bayes.predict(x[:5], method="linear"), rtol=1e-8)
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if "backward" in name]


@pytest.mark.slow
def test_gradient_without_an_operator_is_named(tmp_path: Path) -> None:
    model, x = Windows(nn.AdaptiveAvgPool2d(3)), torch.randn(24, 3, 11, 11, generator=torch.Generator().manual_seed(0))
    settle(model, x)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
    with pytest.raises(mcbn.MCBNError, match=r"no operator for aten._adaptive_avg_pool2d_backward.*method='sample'"):
        bayes.export(tmp_path / "net.onnx", x[:2], method="linear")
    assert list(tmp_path.iterdir()) == []


class TwoInputs(nn.Module):
    """Two inputs by name, one shared by all rows, and a norm that sees two rows an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(8, 1)

    def forward(self, pairs: Tensor, weight: Tensor) -> dict[str, Tensor]:
        h = self.bn(self.first(pairs.reshape(-1, 3)))  # (2 N, 4)
        return {"out": self.last(h.tanh().reshape(pairs.shape[0], -1)) * weight}


@pytest.mark.slow
def test_inputs_by_name_and_norms_of_several_rows_an_input(tmp_path: Path) -> None:
    model = TwoInputs()
    scramble(model)
    generator = torch.Generator().manual_seed(0)
    data = {"pairs": torch.randn(40, 2, 3, generator=generator), "weight": torch.rand(40, 1, generator=generator)}
    rows = [{name: value[i] for name, value in data.items()} for i in range(40)]
    loader = torch.utils.data.DataLoader(rows, batch_size=10)
    with pytest.warns(UserWarning, match="disagree with the running statistics"):
        bayes = mcbn.MCBN(model, "regression").fit(loader, n_samples=5)
    bayes.export(tmp_path / "net.onnx", {name: value[:3] for name, value in data.items()})
    few = {name: value[:7] for name, value in data.items()}
    assert_same(served(tmp_path / "net.onnx", **few), bayes.predict(few))


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(x)
        return h if h.sum() > 1000 else h + 1  # this line decides


class Relating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(x).square()
        return h - h.mean(0)


def of(model: nn.Module) -> tuple[mcbn.MCBN, Tensor]:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    settle(model, x)
    return mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8), x


def test_control_flow_on_values_is_told_with_its_line(tmp_path: Path) -> None:
    bayes, x = of(Choosy())
    with pytest.raises(mcbn.MCBNError, match=r"Choosy.*test_export.py.*this line decides.*depends on the values"):
        bayes.export(tmp_path / "net.onnx", x)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_network_that_relates_inputs_is_refused_but_for_one_draw_a_pass(tmp_path: Path) -> None:
    bayes, x = of(Relating())
    (tmp_path / "net.onnx").write_text("before")
    with pytest.raises(mcbn.MCBNError, match=r"chunk_size=1"):
        bayes.export(tmp_path / "net.onnx", x[:3], chunk_size=4)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("net.onnx", "before")]
    for chunk_size in (None, 1):  # left to itself, one draw a pass is taken
        program = export.to_torch_export(bayes, x[:3], chunk_size=chunk_size)
        assert_same(program.module()(x[:5]), bayes.predict(x[:5]))


def test_chunk_follows_the_size_and_divides_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert export._chunk(100, 1000, None) == 100
    assert export._chunk(100, export.CHUNK_VALUES // 30, None) == 25
    assert export._chunk(100, 10 * export.CHUNK_VALUES, None) == 1
    assert export._chunk(100, 1000, 7) == 5
    assert export._chunk(10, 1000, 64) == 10
    bayes, x = fitted("regression")
    monkeypatch.setattr(export, "MOST_VALUES", 100)
    with pytest.raises(mcbn.MCBNError, match=r"12 draws in one pass.*smaller chunk_size, which loops.*method='linear'"):
        export.to_torch_export(bayes, x[:3], chunk_size=12)
    with pytest.raises(mcbn.MCBNError, match=r"2 gradients of 12 inputs.*use method='sample'"):
        export.to_torch_export(bayes, x[:12], method="linear")


def test_bad_arguments_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted("regression")
    path = tmp_path / "net.onnx"
    with pytest.raises(mcbn.MCBNError, match="not fitted yet"):
        mcbn.MCBN(bayes.model, "regression").export(path, x)
    with pytest.raises(mcbn.MCBNError, match=r"method must be one of \['sample', 'linear'\], got 'laplace'"):
        bayes.export(path, x, method="laplace")
    with pytest.raises(mcbn.MCBNError, match=r"the folder .*nowhere does not exist"):
        bayes.export(tmp_path / "nowhere" / "net.onnx", x)
    with pytest.raises(mcbn.MCBNError, match="it is a folder"):
        bayes.export(tmp_path, x)
    with pytest.raises(mcbn.MCBNError, match="n_samples=13 asked of a posterior of 12"):
        bayes.export(path, x, n_samples=13)
    with pytest.raises(mcbn.MCBNError, match="chunk_size must be a whole number, at least 1; got 0"):
        bayes.export(path, x, chunk_size=0)
    with pytest.raises(mcbn.MCBNError, match="at least 2 draws; got 1"):
        bayes.export(path, x, n_samples=1, method="linear")
    with pytest.raises(mcbn.MCBNError, match="holds no inputs"):
        bayes.export(path, x[:0])
    with pytest.raises(mcbn.MCBNError, match="could not run on what it was given"):
        bayes.export(path, x[:, :3])
    with pytest.raises(mcbn.MCBNError, match="example_x must be a tensor"):
        bayes.export(path, "net")
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted("regression")
    monkeypatch.setattr(export, "PACKAGES", ("onnx", "onnx_of_another_world"))
    with pytest.raises(mcbn.MCBNError, match=r"needs onnx_of_another_world; pip install 'mcbn\[export\]'"):
        bayes.export(tmp_path / "net.onnx", x)


@pytest.mark.slow
def test_served_as_documented_without_torch_or_mcbn(tmp_path: Path) -> None:
    bayes, x = fitted("classification", dtype=torch.float32)
    bayes.export(tmp_path / "net.onnx", x[:3])
    np.save(tmp_path / "x.npy", x[:6].numpy())
    found = re.search(r'```python title="serve.py"\n(.*?)```', DOCS.read_text(), re.DOTALL)
    assert found is not None
    block = "import sys\nsys.modules['torch'] = sys.modules['mcbn'] = None\n"
    (tmp_path / "serve.py").write_text(block + found[1])
    files = [str(tmp_path / name) for name in ("serve.py", "net.onnx", "x.npy", "results.npz")]
    done = subprocess.run([sys.executable, *files], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'task': 'classification'" in done.stdout
    results = {name: torch.from_numpy(value) for name, value in np.load(files[-1]).items()}
    assert_same(results, bayes.predict(x[:6]))


@pytest.mark.parametrize("score", ["std", "absolute"])
def test_calibrated_intervals_are_exported(tmp_path: Path, score: str) -> None:
    bayes, x = fitted("regression")
    y = bayes.plain(x) + torch.randn(bayes.plain(x).shape, generator=torch.Generator().manual_seed(0))
    pred = bayes.calibrate((x, y), level=0.8, score=score).predict(x)
    bayes.export(tmp_path / "net.onnx", x)
    results = served(tmp_path / "net.onnx", x=x)
    assert list(results) == ["mean", "variance", "epistemic", "low", "high"]
    for edge, expected in zip(("low", "high"), pred.interval(0.8), strict=True):
        torch.testing.assert_close(results[edge], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("score", "groups"), [("aps", None), ("raps", "class"), ("lac", None)])
def test_calibrated_sets_are_exported(tmp_path: Path, score: str, groups: Any) -> None:
    bayes, x = fitted("classification")
    bayes.tau = 0.2
    y = bayes.plain(x).argmax(1)
    y[:3] = 1 - y[:3]
    pred = bayes.calibrate((0.9 * x, y), score=score, groups=groups).predict(x)  # no x lies at the threshold
    bayes.export(tmp_path / "net.onnx", x, level=0.7)
    results = served(tmp_path / "net.onnx", x=x)
    assert list(results) == ["probs", "entropy", "mutual_information", "set"]
    assert torch.equal(results["set"], pred.set(0.7))
    assert results["set"].any(1).all() or score == "lac"


@pytest.mark.parametrize(
    ("task", "method"),
    [("classification", "sample"), pytest.param("regression", "linear", marks=pytest.mark.slow)],
)
def test_several_networks_are_one_file(tmp_path: Path, task: str, method: str) -> None:
    (first, x), (second, _) = make("1d", dtype=torch.float64), make("1d", dtype=torch.float64)
    scramble(second, 7)
    settle(second, x)
    bayes: Any = mcbn.MCBN([first, second], task).fit(x, n_samples=6, batch_size=8)
    bayes.tau = 2.0
    bayes.export(tmp_path / "both.onnx", x, method=method)
    pred = bayes.predict(x, method=method)
    assert pred.between.max() > 0
    assert_same(served(tmp_path / "both.onnx", x=x), pred)


def test_what_a_graph_cannot_promise_is_refused(tmp_path: Path) -> None:
    bayes, x = fitted("regression")
    with pytest.raises(mcbn.MCBNError, match="needs a calibration to promise it"):
        bayes.export(tmp_path / "net.onnx", x, level=0.9)
    bayes.calibrate((x, bayes.plain(x) + 1), score="quantile")
    with pytest.raises(mcbn.MCBNError, match="one graph cannot hold this calibration"):
        bayes.export(tmp_path / "net.onnx", x, level=0.5)
