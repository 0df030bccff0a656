"""`fit` on ranks that talk over gloo: each ends with the posterior of one process, bit for bit, or all raise."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mcbn
import mcbn.distributed
from mcbn import MCBNError
from test_batching_shares import T, small
from workplace import environment

RANK = textwrap.dedent(
    """
    import copy, json, sys, warnings

    warnings.filterwarnings("ignore", "mcbn: drawn batch statistics disagree")
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    sys.path.insert(0, sys.argv[4])
    import mcbn
    from mcbn import MCBNError, distributed
    from test_batching_shares import T, equal, fit, small

    torch.set_num_threads(1)
    rank, W = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=W)
    torch.manual_seed(0)
    network, x = small()
    network[1].running_mean += rank  # as after training: every rank has averaged its own batches
    said = {}

    def attempt(name, function):
        try:
            said[name] = function()
        except MCBNError as error:
            said[name] = f"refused: {error}"

    def fitted(data=x, model=network, **options):
        bayes = mcbn.MCBN(model, "regression")
        return distributed.fit(bayes, data, **{"n_samples": T, "batch_size": 16, **options}).posterior

    attempt("same", lambda: equal(fitted(seed=2), fit(network, x, seed=2)))
    attempt("centred", lambda: torch.allclose(  # on the running statistics of the first rank
        fitted(centre="running").mean["1"].mean(0), network[1].running_mean - rank, atol=1e-4))
    attempt("one group", lambda: equal(fitted(n_samples=5), fit(network, x, n_samples=5)))
    double = (x.double(), copy.deepcopy(network).double())
    attempt("double", lambda: equal(fitted(*double), fit(double[1], double[0])))
    attempt("gaussian", lambda: torch.equal(
        fitted(posterior="gaussian").mean["1"], fit(network, x, posterior="gaussian").mean["1"]))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(network))
    loader = DataLoader(TensorDataset(x), batch_size=8)
    attempt("global batch", lambda: equal(
        fitted(loader, synchronised, batch_size=None), fit(synchronised, loader, batch_size=8 * W)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(synchronised, loader, batch_size=None)
        fit(synchronised, loader, batch_size=8 * W)
    said["warned"] = [str(w.message) for w in caught if "SyncBatchNorm" in str(w.message)]
    attempt("own batch", lambda: fitted(loader, network, batch_size=None).batch_size)
    attempt("broken", lambda: fitted(torch.full_like(x, torch.nan) if rank == W - 1 else x, n_samples=200))
    attempt("other seed", lambda: fitted(seed=rank))
    attempt("other weights", lambda: fitted(model=small()[0] if rank else network))
    attempt("diagonal", lambda: fitted(posterior="diagonal"))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(said))
    """
)


def run_ranks(folder: Path, W: int) -> list[dict[str, object]]:
    here = str(Path(__file__).parent)
    commands = [
        [sys.executable, "-W", "error", "-c", RANK, str(r), str(W), str(folder / "meet"), here] for r in range(W)
    ]
    ranks = [subprocess.Popen(c, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for c in commands]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * W, outputs[0][1].decode()
    return [json.loads(out.decode().splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("W", [2, 4])
def test_every_rank_ends_with_the_posterior_of_one_process(tmp_path, W):
    for said in run_ranks(tmp_path, W):
        exact = ["same", "centred", "one group", "double", "gaussian", "global batch"]
        assert {name: said[name] for name in exact} == dict.fromkeys(exact, True)
        assert len(said["warned"]) == 1
        assert f"all {W} ranks together" in said["warned"][0]
        assert said["own batch"] == 8
        assert f"rank {W - 1} could not draw its share" in said["broken"]
        assert "non-finite" in said["broken"]
        assert "ranks differ in seed: 0 on rank 0, 1 on rank 1" in said["other seed"]
        assert "ranks differ in weights of the network" in said["other weights"]
        assert "one pass over the data" in said["diagonal"]


def test_without_a_process_group_the_plain_fit_is_named():
    network, x = small()
    with pytest.raises(MCBNError, match=r"init_process_group first, or bayes\.fit"):
        mcbn.distributed.fit(mcbn.MCBN(network, "regression"), x, n_samples=T)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_rank_is_the_plain_fit(tmp_path, backend):
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        pytest.skip("NCCL needs a GPU")
    network, x = small()
    network = network.to("cuda" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    try:
        merged = mcbn.distributed.fit(mcbn.MCBN(network, "regression"), x, n_samples=40, batch_size=16).posterior
    finally:
        dist.destroy_process_group()
    whole = mcbn.MCBN(network, "regression").fit(x, n_samples=40, batch_size=16).posterior
    assert all(torch.equal(merged.var[name], whole.var[name]) for name in whole.layers)


def test_a_fit_forgets_what_was_found_for_the_draws_before(tmp_path):
    network, x = small()
    y, options = torch.randn(len(x), 6), {"n_samples": 8, "batch_size": 16}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    try:
        bayes = mcbn.MCBN(network, "regression").fit(x, **options).calibrate((x, y), score="absolute")
        bayes.adaptation, bayes.tau_at_bound = "of the draws before", True
        with pytest.warns(UserWarning, match="calibration is dropped") as caught:
            mcbn.distributed.fit(bayes, x, **options)
    finally:
        dist.destroy_process_group()
    assert (bayes.calibration, bayes.adaptation, bayes.tau_at_bound) == (None, None, False)
    assert caught[0].filename == __file__  # the user's own line
