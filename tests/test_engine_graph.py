"""Facts of traced operations, and the rules that rest on them; a graph cut in two computes what it did in one."""

import gc
import linecache
import os

import pytest
import torch
from torch import Tensor, fx, nn

from mcbn.batch_norm import watch
from mcbn.engine.graph import KEY, Facts, as_code, facts, matters, reached, split
from mcbn.engine.rewrite import depends_on_draw, work_in_place
from mcbn.engine.trace import ReplayTracer, UntraceableError
from mcbn.network import Network


class Traced(nn.Module):
    """Batch norm of a Linear, and what a test does with both."""

    def __init__(self, run) -> None:
        super().__init__()
        self.first, self.bn, self.run = nn.Linear(3, 4), nn.BatchNorm1d(4), run

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        return self.run(x, before, self.bn(before))


def trace(run) -> ReplayTracer:
    network, tracer = Network(Traced(run).eval()), ReplayTracer({"bn": torch.zeros(4)}, {"bn": torch.ones(4)})
    watch(network.module)
    with torch.no_grad():
        tracer.trace(network, torch.randn(5, 3))
    return tracer


def node(tracer: ReplayTracer, name: str) -> fx.Node:
    (only,) = (node for node in tracer.graph.nodes if getattr(node.target, "__name__", "") == name)
    return only


def test_every_operation_has_facts_of_its_result() -> None:
    tracer = trace(lambda x, before, h: torch.tanh(h))
    for one in tracer.graph.nodes:
        assert (KEY in one.meta) == (one.op != "output")
    assert facts(node(tracer, "tanh")) == Facts((5, 4), torch.float32, memory=node(tracer, "tanh").name)


def test_views_share_memory_and_copies_do_not() -> None:
    tracer = trace(lambda x, before, h: h[:, :2].t().clone())
    owner = node(tracer, "batch_norm")
    assert facts(node(tracer, "t")).memory == facts(node(tracer, "__getitem__")).memory == owner.name
    assert facts(node(tracer, "clone")).memory == node(tracer, "clone").name


def test_a_change_in_place_names_the_memory_it_changes_and_stays_though_nobody_reads_it() -> None:
    def run(x: Tensor, before: Tensor, h: Tensor) -> Tensor:
        h[:, :2].mul_(3)
        return h

    tracer = trace(run)
    assert facts(node(tracer, "mul_")).changes == {node(tracer, "batch_norm").name}
    assert matters(node(tracer, "mul_"))
    assert not matters(node(tracer, "linear"))


def test_sizes_that_follow_values_are_not_written_down() -> None:
    with pytest.raises(UntraceableError, match="__getitem__ gives a size that depends on values"):
        trace(lambda x, before, h: h + x[x > 0].sum())


def shared_value_changed(x: Tensor, before: Tensor, h: Tensor) -> Tensor:
    return before.add_(h)


def read_value_changed(x: Tensor, before: Tensor, h: Tensor) -> Tensor:
    before.add_(1)
    return h


@pytest.mark.parametrize(
    ("run", "reason"),
    [(shared_value_changed, "that all draws share"), (read_value_changed, "behind them")],
)
def test_what_cannot_run_once_for_all_draws_is_refused(run, reason: str) -> None:
    with pytest.raises(UntraceableError, match=reason):
        depends_on_draw(trace(run).graph)


@pytest.mark.parametrize(
    ("run", "in_place"),
    [
        (lambda x, before, h: torch.relu(h), True),
        (lambda x, before, h: torch.relu(h) + h, False),  # read by another
        (lambda x, before, h: torch.relu(h[:, :2]), False),  # a view
        (lambda x, before, h: h + torch.relu(before), False),  # runs once for all draws
    ],
    ids=["alone", "read twice", "view", "shared"],
)
def test_only_values_that_nobody_else_can_see_are_overwritten(run, in_place: bool) -> None:
    graph = trace(run).graph
    work_in_place(graph, depends_on_draw(graph))
    assert any(one.target is torch.relu_ for one in graph.nodes) == in_place


def whole() -> tuple[fx.Graph, fx.Node]:
    """(x, y) -> sin(x) * c + y * rows(sin(x)), c a constant."""
    graph = fx.Graph()
    x, y, c = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("c")
    sine = graph.call_function(torch.sin, (x,))
    rows = graph.call_function(len, (sine,))
    first = graph.call_function(torch.mul, (sine, c))
    graph.output(graph.call_function(torch.add, (first, graph.call_function(torch.mul, (y, rows)))))
    return graph, y


@pytest.mark.parametrize("again", [False, True])
def test_both_halves_of_a_graph_compute_what_the_whole_does(again: bool) -> None:
    graph, y = whole()
    root = nn.Module()
    root.register_buffer("c", torch.randn(3))
    later = reached(graph, lambda one: one is y)
    sizes = [one for one in graph.nodes if one.target is len] if again else []
    first, second, crossing = split(graph, later, both=sizes)
    assert [one.target for one in crossing] == ([torch.sin, torch.mul] if again else [len, torch.mul])
    first, second = as_code(root, first), as_code(root, second)
    x, value = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(second(*first(x), value), as_code(root, graph)(x, value))


def test_copies_of_a_node_keep_its_facts() -> None:
    graph, y = whole()
    known = Facts((2, 3), torch.float32, memory="y")
    y.meta[KEY] = known
    _, second, _ = split(graph, reached(graph, lambda one: one is y))
    assert [facts(one) for one in second.nodes if one.name == "y"] == [known]


def identity() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return as_code(nn.Module(), graph)


def test_sources_are_not_forgotten_under_whoever_reads_them(monkeypatch) -> None:
    modules = [identity()]
    file = modules[0].forward.__code__.co_filename
    monkeypatch.setattr(linecache, "cache", {__file__: (1, 1.0, [], __file__), file: (1, None, [], file)})

    stat = os.stat

    def collecting(path: str) -> os.stat_result:
        modules.clear()
        gc.collect()
        return stat(path)

    monkeypatch.setattr(os, "stat", collecting)  # `linecache` imports it when it is called, from Python 3.13 on
    linecache.checkcache()
    identity()
    assert file not in linecache.cache
