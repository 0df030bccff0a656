"""The estimators of the segmentation study: the paper's by hand, the plain network's."""

import torch
from torch import nn

from kinds import norms_in_training
from mcbn_study.networks import IMAGENET, SegNet
from mcbn_study.segmentation import measure as estimators, train as training
from segmented import scenes, segnet
from untouched import untouched


def test_query_inside_is_a_training_pass_of_the_first_two_layers() -> None:
    network, train, query = segnet(), scenes(5, seed=1).x, scenes(2, seed=2).x
    M, T, seed = 4, 3, 7
    with untouched(network):
        found, maps = estimators.query_inside(network, train, batch_size=M, n_samples=T, seed=seed)(query)
    by_hand = norms_in_training(segnet())
    for name, module in by_hand.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            module.training = name in ("encoder.0.1", "encoder.0.4")
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(query)):
        probs = []
        for rows in torch.randint(len(train), (T, M - 1), generator=generator):
            batch = torch.cat([query[i : i + 1], train[rows]])
            with torch.no_grad():
                probs.append(torch.softmax(by_hand(training.normalize(batch).double())[0], 0))
        drawn = torch.stack(probs)  # (T, K, H, W)
        mean = drawn.mean(0)
        torch.testing.assert_close(found[i], mean, rtol=1e-9, atol=1e-12)
        variance = (drawn - mean).square().mean(0).mean(0)
        assert variance.max() > 1e-9
        torch.testing.assert_close(maps["variance"][i], variance, rtol=1e-6, atol=1e-14)
        entropy = -(mean * mean.log()).sum(0)
        torch.testing.assert_close(maps["entropy"][i], entropy, rtol=1e-9, atol=1e-12)
        expected = entropy + (drawn * drawn.log()).sum(1).mean(0)
        torch.testing.assert_close(maps["mutual_information"][i], expected, rtol=1e-6, atol=1e-12)


def test_query_inside_has_no_spread_where_the_batch_is_always_the_same() -> None:
    only = scenes(1, seed=1).x
    _, maps = estimators.query_inside(segnet(), only, batch_size=3, n_samples=4)(scenes(1, seed=2).x)
    assert maps["variance"].max() == 0


def test_plain_is_the_softmax_of_the_network() -> None:
    network, x = SegNet(11, widths=(4, 4, 4, 4, 4)).eval(), scenes(2).x
    found, maps = estimators.plain(network, x)
    with torch.no_grad():
        probs = torch.softmax(network(training.normalize(x)), 1)
    torch.testing.assert_close(found, probs)
    torch.testing.assert_close(maps["entropy"], -(probs * probs.log()).sum(1))


def test_normalize_is_the_usual_scaling() -> None:
    x = scenes(2).x
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(training.normalize(x), (x / 255 - mean) / std)
