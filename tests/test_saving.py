"""Posterior files: equal predictions back, and a clear word on every file that does not fit."""

import json
import math
import resource
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mcbn
from kinds import KINDS, make
from mcbn.saving import FORMAT_VERSION, read_tensors, write_tensors


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_posterior_predicts_the_same(kind: str, tmp_path: Path) -> None:
    model, x = make(kind)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=12)
    bayes.tau = 3.0
    bayes.save(tmp_path / "net.mcbn")
    again = mcbn.MCBN.load(tmp_path / "net.mcbn", model)
    assert torch.equal(again.sample(x), bayes.sample(x))
    assert (again.tau, again.task, again.posterior.batch_size) == (3.0, "regression", 12)
    assert again.posterior.layers == bayes.posterior.layers
    assert (again.predict(x).epistemic > 0).any()
    assert [p.name for p in tmp_path.iterdir()] == ["net.mcbn"]


def test_a_full_disk_is_told_as_python_does_and_the_old_file_stays(tmp_path: Path) -> None:
    path, limits = tmp_path / "net.mcbn", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_tensors(path, {"x": torch.ones(10)}, {})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write_tensors(path, {"x": torch.ones(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["1d", "residual", "called-twice"])
@pytest.mark.parametrize("family", ["gaussian", "layerwise", "diagonal"])
def test_gaussian_posterior_loads_the_same(family: str, kind: str, tmp_path: Path) -> None:
    model, x = make(kind)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=12, posterior=family, seed=3)
    bayes.posterior = bayes.posterior.at_batch_size(6)
    bayes.save(tmp_path / "net.mcbn")
    again = mcbn.MCBN.load(tmp_path / "net.mcbn", model)
    assert torch.equal(again.sample(x), bayes.sample(x))
    assert torch.equal(again.sample(x, n_samples=40), bayes.sample(x, n_samples=40))
    linear = [b.predict(x, method="linear").epistemic for b in (bayes, again)]
    assert torch.equal(*linear)
    assert repr(again.posterior) == repr(bayes.posterior)
    assert (again.posterior.family, again.posterior.batch_size, again.posterior.fitted_batch_size) == (family, 6, 12)


@pytest.mark.parametrize("family", ["gaussian", "layerwise", "diagonal"])
def test_gaussian_file_does_not_grow_with_the_data_or_the_draws(family: str, tmp_path: Path) -> None:
    sizes = []
    for n, T in ((64, 30), (4096, 30), (64, 300)):
        model, x = make("1d", n=n, batch_size=16)
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=T, batch_size=16, posterior=family)
        bayes.save(tmp_path / "net.mcbn")
        sizes.append((tmp_path / "net.mcbn").stat().st_size)
    assert max(sizes) - min(sizes) < 16  # the number of digits of T


def test_tuned_batch_size_is_kept(tmp_path: Path) -> None:
    model, x = make("1d", n=64, dtype=torch.float64, batch_size=16)
    for family in ("sample", "gaussian"):
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=20, batch_size=16, posterior=family)
        y = bayes.predict(x).mean + 0.01
        bayes.tune((x, y), batch_sizes="auto").save(tmp_path / "net.mcbn")
        again = mcbn.MCBN.load(tmp_path / "net.mcbn", model)
        assert again.posterior.batch_size == bayes.posterior.batch_size == 256
        assert again.posterior.fitted_batch_size == 16
        assert torch.equal(again.predict(x).variance, bayes.predict(x).variance)


def test_files_of_format_1_still_load(tmp_path: Path) -> None:
    path, model, x = saved(tmp_path)
    before = mcbn.MCBN.load(path, model).sample(x)
    rewrite(path, checked=False, format_version="1", family=None, seed=None, fitted_batch_size=None)
    with pytest.warns(UserWarning, match=r"net.mcbn has posterior format 1, without checksums.* save it again"):
        again = mcbn.MCBN.load(path, model)
    assert torch.equal(again.sample(x), before)
    assert (again.posterior.family, again.posterior.batch_size) == ("sample", 8)


@pytest.mark.parametrize(
    "change", [{"layers": json.dumps([["1", [5, 6]]])}, {"family": "layerwise"}, {"family": "new"}]
)
def test_damaged_gaussian(change: dict[str, str], tmp_path: Path) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, posterior="gaussian")
    bayes.save(tmp_path / "net.mcbn")
    with pytest.raises(mcbn.MCBNError, match=r"net.mcbn is damaged: gaussian.\S+ should be|must be one of"):
        mcbn.MCBN.load(rewrite(tmp_path / "net.mcbn", **change), model)


def saved(tmp_path: Path, **options: object) -> tuple[Path, nn.Module, Tensor]:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "classification", **options).fit(x, n_samples=5, batch_size=8)
    bayes.save(tmp_path / "net.mcbn")
    return tmp_path / "net.mcbn", model, x


def rewrite(path: Path, *, checked: bool = True, **changes: str | None) -> Path:
    """Change the metadata of a posterior file, with checksums that fit or without."""
    tensors, metadata = read_tensors(path)
    text = {k: v for k, v in {**metadata, **changes}.items() if v is not None}
    (write_tensors(path, tensors, text) if checked else save_file(tensors, path, text))
    return path


def test_settings_come_back(tmp_path: Path) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression", layers=1, inputs="x", output=None)
    bayes.fit({"x": x, "z": x}, n_samples=5, batch_size=8)
    bayes.tau = torch.tensor([1.0, 2.0])
    bayes.save(tmp_path / "a.mcbn")
    again = mcbn.MCBN.load(tmp_path / "a.mcbn", model)
    assert torch.equal(again.tau, bayes.tau)
    assert (again.inputs, again.layers) == ("x", ["1"])
    untuned = mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8)
    untuned.save(tmp_path / "b.mcbn")
    assert mcbn.MCBN.load(tmp_path / "b.mcbn", model).tau == float("inf")


def test_functions_as_settings_come_again_at_load(tmp_path: Path) -> None:
    path, model, x = saved(tmp_path, output=lambda y: y * 2)
    doubled = mcbn.MCBN.load(path, model, output=lambda y: y * 2)
    assert torch.equal(doubled.sample(x), 2 * mcbn.MCBN.load(path, model).sample(x))
    last = mcbn.MCBN.load(path, model, inputs=lambda batch: batch["z"])
    loader = DataLoader([{"z": row} for row in x], batch_size=6)
    torch.testing.assert_close(last.sample(loader), last.sample(x))


def test_any_tensors_come_back_and_errors_end_with_the_hint(tmp_path: Path) -> None:
    path, tensors = tmp_path / "new" / "any.safetensors", {"a": torch.arange(6.0).reshape(2, 3).T}
    write_tensors(path, tensors, {"made": "here"})
    found, metadata = read_tensors(path)
    assert torch.equal(found["a"], tensors["a"])
    assert metadata == {"made": "here"}
    with pytest.raises(mcbn.MCBNError, match=r"there is no file .*none; make it first$"):
        read_tensors(tmp_path / "none", hint="make it first")
    path.write_bytes(b"")
    with pytest.raises(mcbn.MCBNError, match=r"any.safetensors is not a whole safetensors file .*; make it again$"):
        read_tensors(path, hint="make it again")


def test_truncated_file(tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(mcbn.MCBNError, match="not a whole safetensors file"):
        mcbn.MCBN.load(path, model)


def test_foreign_files(tmp_path: Path) -> None:
    path, model, x = saved(tmp_path)
    path.write_text("hello")
    with pytest.raises(mcbn.MCBNError, match="not a whole safetensors file"):
        mcbn.MCBN.load(path, model)
    save_file({"x": x}, path)
    with pytest.raises(mcbn.MCBNError, match="not the posterior of one network"):
        mcbn.MCBN.load(path, model)
    with pytest.raises(mcbn.MCBNError, match="there is no file"):
        mcbn.MCBN.load(tmp_path / "none.mcbn", model)


@pytest.mark.parametrize("version", ["0", "99", None])
def test_other_format_version(version: str | None, tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    with pytest.raises(mcbn.MCBNError, match=f"format {version}, this mcbn reads {FORMAT_VERSION}"):
        mcbn.MCBN.load(rewrite(path, format_version=version), model)


def test_damaged_layers(tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    with pytest.raises(mcbn.MCBNError, match=r"mean.gone should be \(5, 6\), found nothing"):
        mcbn.MCBN.load(rewrite(path, layers=json.dumps([["gone", [5, 6]]])), model)
    with pytest.raises(mcbn.MCBNError, match=r"mean.1 should be \(9, 9\), found shape \(5, 6\)"):
        mcbn.MCBN.load(rewrite(path, layers=json.dumps([["1", [9, 9]]])), model)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda net: net.append(nn.Linear(2, 2)), "'module 7: Linear'"),
        (lambda net: net.__setitem__(2, nn.Tanh()), "there 'module 2: ReLU', here 'module 2: Tanh'"),
        (
            lambda net: net.__setitem__(3, nn.Linear(6, 6, bias=False)),
            "there 'tensor 3.bias: 6', here 'tensor 4.weight",
        ),
        (lambda net: net.__setitem__(6, nn.Linear(6, 9)), "there 'tensor 6.weight: 2x6', here 'tensor 6.weight: 9x6'"),
    ],
)
def test_other_network_names_the_first_difference(change: object, difference: str, tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    change(model)
    with pytest.raises(mcbn.MCBNError, match=f"fitted on another network: .*{difference}"):
        mcbn.MCBN.load(path, model)


def test_other_weights_warn(tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    model[1].num_batches_tracked += 1
    mcbn.MCBN.load(path, model)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    with pytest.warns(UserWarning, match="fitted on other weights"):
        mcbn.MCBN.load(path, model)


def test_other_precision_loads(tmp_path: Path) -> None:
    path, model, x = saved(tmp_path)
    assert mcbn.MCBN.load(path, model.bfloat16()).predict(x).probs.shape == (24, 2)


def test_posterior_saved_from_a_wrapped_network_loads_on_the_bare_one(tmp_path: Path) -> None:
    model, x = make("1d")
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        bayes = mcbn.MCBN(wrapped, "regression").fit(x, n_samples=2, batch_size=8)
        bayes.save(tmp_path / "net.mcbn")
        assert torch.equal(mcbn.MCBN.load(tmp_path / "net.mcbn", model).sample(x), bayes.sample(x))


def test_failed_save_leaves_no_file_and_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, x = saved(tmp_path)
    before = path.read_bytes()

    def broken(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:4])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(KeyboardInterrupt):
        mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(mcbn.MCBNError, match="does not exist"):
        mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8).save(tmp_path / "no" / "net.mcbn")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_posterior_loads_onto_another_device(before: str, after: str, tmp_path: Path) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model.to(before), "regression").fit(x, n_samples=5, batch_size=12)
    expected = bayes.sample(x)
    bayes.save(tmp_path / "net.mcbn")
    again = mcbn.MCBN.load(tmp_path / "net.mcbn", model.to(after))
    assert all(value.device.type == after for value in again.posterior.mean.values())
    torch.testing.assert_close(again.sample(x), expected, rtol=1e-3, atol=1e-3)


def test_every_flipped_bit_of_a_file_is_told(tmp_path: Path) -> None:
    path, model, x = saved(tmp_path)
    whole, expected = path.read_bytes(), mcbn.MCBN.load(path, model).sample(x)
    for place in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(mcbn.MCBNError, match=r"net\.mcbn"):
            mcbn.MCBN.load(path, model)
    path.write_bytes(whole)
    assert torch.equal(mcbn.MCBN.load(path, model).sample(x), expected)


KEYS = ["layers", "batch_size", "tau", "structure", "weights", "numbers", "seed", "inputs", "columns", "moved"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "1e999", "-1e9", None])
def test_headers_without_checksums_are_read_or_refused(key: str, text: str | None, tmp_path: Path) -> None:
    """Files of format 2: whatever their header says is read, or an MCBNError."""
    path, model, x = saved(tmp_path)
    rewrite(path, checked=False, format_version="2", **{key: text})
    with warnings.catch_warnings(), suppress(mcbn.MCBNError):
        warnings.simplefilter("ignore")
        mcbn.MCBN.load(path, model).sample(x)


def test_format_3_without_checksums_is_damaged(tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    with pytest.raises(mcbn.MCBNError, match="not as it was written"):
        mcbn.MCBN.load(rewrite(path, checked=False), model)


def test_checksums_under_another_name_in_another_format_are_found(tmp_path: Path) -> None:
    path, model, _ = saved(tmp_path)
    content = path.read_bytes().replace(b'"checksums"', b'"checksome"')
    changed = bytearray(content.replace(b'"format_version":"3"', b'"format_version":"2"'))
    changed[-3] ^= 1
    path.write_bytes(changed)
    with pytest.raises(mcbn.MCBNError, match="not as it was written"):
        mcbn.MCBN.load(path, model)


@pytest.mark.parametrize(("kind", "value"), [("var", -1e-3), ("var", math.nan), ("mean", math.inf)])
def test_statistics_that_cannot_be_are_refused_everywhere(kind: str, value: float, tmp_path: Path) -> None:
    path, model, x = saved(tmp_path)
    bayes = mcbn.MCBN.load(path, model)
    tensors, metadata = read_tensors(path)
    tensors[f"{kind}.1"][2, 3] = value
    write_tensors(path, tensors, metadata)
    wrong = r"negative variance, -0.001, of layer '1'|statistics of layer '1' that are not finite"
    with pytest.raises(mcbn.MCBNError, match=rf"net\.mcbn is damaged: it has .*({wrong})|{wrong}"):
        mcbn.MCBN.load(path, model)
    state, before = bayes.state_dict(), bayes.sample(x)
    state[f"{kind}.1"][2, 3] = value
    with pytest.raises(mcbn.MCBNError, match=wrong):
        bayes.load_state_dict(state)
    changed = bayes.posterior.rows(slice(None))
    changed = replace(changed, **{kind: {name: t.clone() for name, t in getattr(changed, kind).items()}})
    getattr(changed, kind)["1"][2, 3] = value
    with pytest.raises(mcbn.MCBNError, match=wrong):
        bayes.posterior = changed
    assert torch.equal(bayes.sample(x), before)
    getattr(bayes.posterior, kind)["1"][2, 3] = value
    with pytest.raises(mcbn.MCBNError, match=wrong):
        bayes.predict(x)


def test_a_gaussian_file_may_not_ask_for_a_billion_draws(tmp_path: Path) -> None:
    model, x = make("1d")
    mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, posterior="gaussian").save(tmp_path / "net.mcbn")
    layers = json.dumps([["1", [10**9, 6]], ["4", [10**9, 6]]])
    with pytest.raises(mcbn.MCBNError, match=r"net\.mcbn declares 1000000000 draws of 24 statistics"):
        mcbn.MCBN.load(rewrite(tmp_path / "net.mcbn", layers=layers), model)


def test_dynamically_quantised_networks_are_saved(tmp_path: Path) -> None:
    model, x = make("1d")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        bayes = mcbn.MCBN(quantised, "regression").fit(x, n_samples=3, batch_size=8)
        bayes.save(tmp_path / "net.mcbn")
        again = mcbn.MCBN.load(tmp_path / "net.mcbn", quantised)
        assert torch.equal(again.sample(x), bayes.sample(x))
        other = torch.ao.quantization.quantize_dynamic(make("1d", seed=1)[0], {nn.Linear}, dtype=torch.qint8)
    with pytest.warns(UserWarning, match="fitted on other weights"):
        mcbn.MCBN.load(tmp_path / "net.mcbn", other)


@pytest.mark.parametrize("note", ["tau", "task", "seed", "inputs", "calibration", "columns", "checksums"])
def test_a_note_takes_no_name_of_the_file(note: str, tmp_path: Path) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=12)
    with pytest.raises(mcbn.MCBNError, match=rf"notes must be texts under names .*; got \['{note}'\]"):
        bayes.save(tmp_path / "net.mcbn", **{note: "9.0"}, made="here")
    with pytest.raises(mcbn.MCBNError, match=r"notes must be texts .*; got \['rows'\]"):
        bayes.save(tmp_path / "net.mcbn", rows=3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    bayes.save(tmp_path / "net.mcbn", made="here")
    assert read_tensors(tmp_path / "net.mcbn")[1]["made"] == "here"


def test_names_of_columns_are_kept(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model, x = make("1d")
    named = pandas.DataFrame(x.numpy(), columns=list("edcba"))
    other = named[list("abcde")]
    bayes = mcbn.MCBN(model, "regression").fit(named, n_samples=3, batch_size=12)
    bayes.save(tmp_path / "net.mcbn")
    several = mcbn.MCBN([model, model], "regression").fit(named, n_samples=3, batch_size=12)
    several.save(tmp_path / "two.mcbn")  # type: ignore[attr-defined]
    for fitted, again in (
        (bayes, mcbn.MCBN.load(tmp_path / "net.mcbn", model)),
        (bayes, mcbn.MCBN(model, "regression").load_state_dict(bayes.state_dict())),
        (several, mcbn.MCBN.load(tmp_path / "two.mcbn", [model, model])),  # type: ignore[arg-type]
    ):
        assert torch.equal(again.predict(other).mean, fitted.predict(named).mean)
        with pytest.raises(mcbn.MCBNError, match="the table lacks"):
            again.predict(other.drop(columns="a"))
    numbered = mcbn.MCBN(model, "regression").fit(pandas.DataFrame(x.numpy()), n_samples=3, batch_size=12)
    again = mcbn.MCBN(model, "regression").load_state_dict(numbered.state_dict())
    assert torch.equal(again.predict(pandas.DataFrame(x.numpy())[[3, 1, 0, 2, 4]]).mean, numbered.predict(x).mean)


def test_rows_of_one_length_in_every_layer(tmp_path: Path) -> None:
    _, model, x = saved(tmp_path)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=6, batch_size=12)
    before, last = bayes.sample(x), bayes.posterior.layers[-1]
    for empty, rows in ((False, 4), (True, 0)):
        kinds = [{} if empty else dict(kind) for kind in (bayes.posterior.mean, bayes.posterior.var)]
        for kind in kinds if not empty else []:
            kind[last] = kind[last][:rows]
        with pytest.raises(mcbn.MCBNError, match="must have mean and var"):
            bayes.posterior = mcbn.Posterior(*kinds, batch_size=12)
    assert torch.equal(bayes.sample(x), before)


def test_a_posterior_takes_the_dtype_of_the_network(tmp_path: Path) -> None:
    _, model, x = saved(tmp_path)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=6, batch_size=12)
    halves = [{name: t.half() for name, t in kind.items()} for kind in (bayes.posterior.mean, bayes.posterior.var)]
    other = bayes.with_posterior(bayes.posterior)
    other.posterior = mcbn.Posterior(*halves, batch_size=12)
    for method in ("sample", "linear"):
        mean = bayes.predict(x, method=method).mean
        torch.testing.assert_close(other.predict(x, method=method).mean, mean, rtol=0.05, atol=0.05)


def test_lists_of_tables_are_read_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    model, x = make("1d", n=48)
    named = pandas.DataFrame(x.numpy(), columns=list("edcba"))
    other = named[list("abcde")]
    for data in ([named[:24], other[24:]], [(named[:24], x[:24]), (other[24:], x[24:])]):
        bayes = mcbn.MCBN(model, "regression").fit(data, n_samples=3, batch_size=12)
        assert torch.equal(bayes.sample(x), mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=12).sample(x))
        for again in (other, [other], [other[:20], named[20:]]):
            assert torch.equal(bayes.predict(again).mean, bayes.predict(x).mean)
