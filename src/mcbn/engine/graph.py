"""A traced pass as an `fx` graph: what is known of each operation, and which changes to the graph that allows.

Why each change is safe stands in `graph.md` beside this file.
"""

import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx, nn

from mcbn.private_torch import forget_source

Condition = Callable[[fx.Node], bool]
KEY = "mcbn"  # of the facts in a node's meta, which are noted once
_gone: list[str] = []  # sources of modules that were collected: not forgotten then, under whoever reads `linecache`


@dataclass(frozen=True)
class Facts:
    """What the trace saw of one operation and its result; copies of a node keep it."""

    shape: tuple[int, ...] = ()  # of the result, where that is a tensor
    dtype: torch.dtype | None = None
    memory: str = ""  # name of the node that made the memory its result lies in: its own, or that of an operand
    changes: frozenset[str] = frozenset()  # memory the network changes here; not what `work_in_place` overwrites


UNKNOWN = Facts()  # of nodes that no trace wrote


def facts(node: fx.Node) -> Facts:
    """Return what is known of a node."""
    return cast(Facts, node.meta.get(KEY, UNKNOWN))


def matters(node: fx.Node) -> bool:
    """Tell whether a node is needed though nobody reads its result: what it changes in place may be read by others."""
    return node.is_impure() or bool(facts(node).changes)


def reached(graph: fx.Graph, starts: Condition) -> set[fx.Node]:
    """Find some nodes and all that is computed from them, the graph's output apart."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "output" and (starts(node) or any(source in behind for source in node.all_input_nodes)):
            behind.add(node)
    return behind


def split(
    graph: fx.Graph, later: Collection[fx.Node], *, both: Collection[fx.Node] = (), needed: Condition = matters
) -> tuple[fx.Graph, fx.Graph, list[fx.Node]]:
    """Cut a graph into what runs first and what runs later; that such an order is safe is for the caller to know.

    Returns both, and the nodes whose values cross: the first gives them, the second takes them as first arguments.
    later: nodes of the second graph, with all that reads them. Placeholders among them are its further arguments.
    both: nodes that both graphs compute (sizes, say), so that they need not cross; constants are in both anyway.
    needed: tells which nodes stay though nobody reads them.
    """
    *nodes, last = graph.nodes
    result = last.all_input_nodes[0]
    behind = {*later, *(node for node in nodes if node.op == "get_attr" or node in both)}
    crossing = [n for n in nodes if n not in behind and (n is result or any(user in behind for user in n.users))]
    first, second = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copies_behind = {node: second.placeholder(f"shared{number}") for number, node in enumerate(crossing)}
    for node in nodes:
        if node not in later:
            copies[node] = first.node_copy(node, copies.__getitem__)
        if node in behind:
            copies_behind[node] = second.node_copy(node, copies_behind.__getitem__)
    first.output(tuple(copies[node] for node in crossing))
    second.output(copies_behind[result])
    for half in (first, second):
        half.eliminate_dead_code(needed)
    return first, second, crossing


def as_code(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Turn a graph into a module that runs it; the source of its code goes after it, when the next is made."""
    with suppress(IndexError):  # other threads take from it too
        while True:
            forget_source(_gone.pop())
    module = fx.GraphModule(root, graph)
    weakref.finalize(module, _gone.append, module.forward.__code__.co_filename).atexit = False
    return module
