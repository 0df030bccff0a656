"""The habits of PyTorch: state_dict, to, autocast, inference mode, compiled and distributed networks."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mcbn
from kinds import make
from untouched import untouched


def fitted(kind: str = "1d", **options: object) -> tuple[mcbn.MCBN, nn.Module, torch.Tensor]:
    model, x = make(kind)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=12, **options)
    bayes.tau = torch.tensor([2.0, 5.0])
    return bayes, model, x


@pytest.mark.parametrize("posterior", ["sample", "gaussian", "layerwise", "diagonal"])
def test_state_dict_round_trip_predicts_the_same(posterior: str) -> None:
    bayes, model, x = fitted(posterior=posterior)
    again = mcbn.MCBN(copy.deepcopy(model), "regression").load_state_dict(bayes.state_dict())
    assert torch.equal(again.sample(x), bayes.sample(x))
    assert torch.equal(again.predict(x).variance, bayes.predict(x).variance)
    twice = again.state_dict()
    assert all(torch.equal(value, twice[name]) for name, value in bayes.state_dict().items())
    assert list(twice) == list(bayes.state_dict())


def test_state_dict_goes_through_torch_save_and_safetensors(tmp_path: Path) -> None:
    bayes, model, x = fitted()
    torch.save(bayes.state_dict(), tmp_path / "a.pt")
    save_file(bayes.state_dict(), tmp_path / "a.safetensors")
    for state in (torch.load(tmp_path / "a.pt", weights_only=True), load_file(tmp_path / "a.safetensors")):
        assert torch.equal(mcbn.MCBN(model, "regression").load_state_dict(state).sample(x), bayes.sample(x))


def test_state_dict_is_a_copy() -> None:
    bayes, _, x = fitted()
    before = bayes.sample(x)
    for value in bayes.state_dict().values():
        value.zero_()
    assert torch.equal(bayes.sample(x), before)


def test_state_dict_of_another_network_names_the_difference_and_changes_nothing() -> None:
    bayes, _, x = fitted()
    other, _, _ = fitted("called-twice")
    before = bayes.sample(x)
    with pytest.raises(mcbn.MCBNError, match=r"the state_dict was fitted on another network: there 'module .*', here"):
        bayes.load_state_dict(other.state_dict())
    assert torch.equal(bayes.sample(x), before)


def test_state_dict_on_other_weights_warns() -> None:
    bayes, model, _ = fitted()
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.warns(UserWarning, match="the state_dict was fitted on other weights"):
        mcbn.MCBN(other, "regression").load_state_dict(bayes.state_dict())


def test_wrong_state_is_refused() -> None:
    bayes, model, _ = fitted()
    state = bayes.state_dict()
    with pytest.raises(mcbn.MCBNError, match="not a state_dict of an MCBN: 'metadata' is missing"):
        bayes.load_state_dict(model.state_dict())
    with pytest.raises(mcbn.MCBNError, match="header cannot be read"):
        bayes.load_state_dict({**state, "metadata": state["metadata"][:-1]})
    with pytest.raises(mcbn.MCBNError, match="task='regression', this MCBN of 'classification'"):
        mcbn.MCBN(model, "classification").load_state_dict(state)
    with pytest.raises(mcbn.MCBNError, match=r"is damaged: mean.4 should be \(5, 6\), found nothing"):
        bayes.load_state_dict({name: value for name, value in state.items() if name != "mean.4"})
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        mcbn.MCBN(model, "regression").state_dict()


def test_to_moves_the_private_copy_alone_and_returns_self() -> None:
    bayes, model, x = fitted()
    single = bayes.sample(x)
    with untouched(model):
        assert bayes.to(torch.float64) is bayes
    double = bayes.sample(x)
    assert double.dtype == bayes.posterior.mean["1"].dtype == torch.float64
    torch.testing.assert_close(double.float(), single, rtol=1e-4, atol=1e-5)
    assert torch.equal(bayes.to("cpu").sample(x), double)
    assert torch.equal(bayes.to(torch.device("cpu"), torch.float32).sample(x), single)
    assert bayes.to(torch.zeros(1, dtype=torch.float64)).sample(x).dtype == torch.float64


def test_half_precision_keeps_statistics_in_single() -> None:
    bayes, _, x = fitted()
    single = bayes.sample(x)
    half = bayes.to(torch.bfloat16)
    assert half.posterior.mean["1"].dtype == torch.float32
    assert half.sample(x).dtype == torch.bfloat16
    torch.testing.assert_close(half.sample(x).float(), single, rtol=0.1, atol=0.1)


def test_to_before_fit_decides_where_the_copy_is_made() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").to(torch.float64)
    assert bayes.plain(x).dtype == torch.float64
    bayes.fit(x, n_samples=3, batch_size=8)
    assert bayes.posterior.var["1"].dtype == torch.float64
    again = mcbn.MCBN(model, "regression").to(torch.float64).load_state_dict(bayes.state_dict())
    assert torch.equal(again.sample(x), bayes.sample(x))


@pytest.mark.parametrize("place", [torch.int64, "nowhere", 3.5])
def test_to_refuses_what_is_no_place(place: object) -> None:
    bayes, _, _ = fitted()
    with pytest.raises(mcbn.MCBNError, match="to takes a"):
        bayes.to(place)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["1d", "residual"])
def test_inference_mode_gives_the_same_numbers_and_leaves_no_trace(kind: str) -> None:
    model, x = make(kind)
    outside = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
    with torch.inference_mode():
        inside = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
        assert torch.equal(inside.sample(x), outside.sample(x))
        linear = inside.predict(x, method="linear").variance
    torch.testing.assert_close(linear, outside.predict(x, method="linear").variance)
    wanted = x.clone().requires_grad_()
    inside.sample(wanted).sum().backward()
    assert wanted.grad is not None
    assert torch.equal(inside.sample(x), outside.sample(x))
    assert inside.load_state_dict(outside.state_dict()).posterior.n_samples == 4


@pytest.mark.parametrize("kind", ["1d", "residual"])
def test_autocast_runs_draws_as_the_network_itself_would(kind: str) -> None:
    model, x = make(kind)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
    full = bayes.sample(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop = torch.stack([bayes.sample(x.clone().requires_grad_(), n_samples=t + 1)[t].detach() for t in range(4)])
        coarse = bayes.sample(x)
        again = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
        kinds = {bayes.sample(x, chunk_size=size).dtype for size in (1, 3, None)}
    assert kinds == {loop.dtype} == {torch.bfloat16}  # as the network's own code, whatever shares a pass
    for other in (loop, full):
        assert (coarse.float() - other.float()).abs().max() < 0.1 * full.abs().max()
    assert torch.equal(bayes.sample(x), full)
    mean, wanted = again.posterior.mean, bayes.posterior.mean
    assert all(torch.allclose(mean[name].float(), wanted[name], rtol=0.1, atol=0.1) for name in wanted)


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
import mcbn
from kinds import make
from untouched import untouched
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
model, x = make("1d")
alone = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
with untouched(model):
    bayes = mcbn.MCBN(wrapped, "regression").fit(x, n_samples=4, batch_size=8)
    drawn = bayes.sample(x)
assert bayes.posterior.layers == ("1", "4")
assert torch.equal(drawn, alone.sample(x))
both = [torch.empty_like(drawn) for _ in range(2)]
dist.all_gather(both, drawn)
assert torch.equal(both[0], both[1])
wrapped(x).sum().backward()
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
net, _ = make("1d")
for shard in (fully_shard, FullyShardedDataParallel):
    try:
        mesh = {{"mesh": torch.distributed.init_device_mesh("cpu", (2,))}} if shard is fully_shard else {{}}
        sharded = shard(make("1d")[0], **mesh)
    except (RuntimeError, ValueError) as error:
        print("cannot shard here:", error)
        continue
    try:
        mcbn.MCBN(sharded, "regression")
    except mcbn.MCBNError as error:
        assert "full_state_dict=True" in str(error)
        print("refused", shard.__name__)
    else:
        raise AssertionError("a sharded network was taken")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_under_ddp_draw_the_same_and_fsdp_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(DISTRIBUTED.format(tests=str(Path(__file__).parent), store=tmp_path / "store"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all("refused" in output for output in outputs), outputs


@pytest.mark.parametrize("wrong", ["scores", "calibration", "columns", "tau"])
def test_a_state_dict_that_fails_late_changes_nothing(wrong: str) -> None:
    bayes, model, x = fitted()
    bayes.calibrate((x, bayes.plain(x)))
    state, other = bayes.state_dict(), mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=12)
    text = json.loads(bytes(state["metadata"].tolist()))
    if wrong == "scores":
        del state["calibration.scores.0"]
    elif wrong == "tau":
        state["tau"] = torch.tensor(-1.0)
    else:
        text[wrong] = "{"
    state["metadata"] = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
    before = other.sample(x)
    with pytest.raises(mcbn.MCBNError, match=r"the state_dict|tau must be"):
        other.load_state_dict(state)
    assert torch.equal(other.sample(x), before)
    assert other.tau == torch.inf
    assert other.calibration is None
