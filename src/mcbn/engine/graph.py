"""A traced pass as an `fx` graph: what is known of each operation, and which changes to the graph that allows.

A trace (`mcbn.engine.trace`) notes once, as `Facts`, what the result of every operation was for the inputs traced.
Every later step reads `facts(node)` alone: the tensors are gone by then. All of them rest on two words.

*Memory.* Two results share memory if one is a view of the other, or the other changed in place. The trace compares
storages: a result in the storage of an operand carries the operand's memory, any other has memory of its own, named by
the node that made it. So equal names mean "may overlap", and different names mean "do not".

*Depends.* A node depends on the draw if it is a stochastic batch norm or reads what depends on the draw.

Why each change is safe:

1. Sharing what comes before the first batch norm (`split`). The other nodes run once, all before the dependent ones of
   every draw. Nodes of either kind keep their order among themselves; a reordered pair could only disturb each other
   through memory. `depends_on_draw` refuses a trace in which a dependent node changes memory it did not make (every
   draw would find the changes of the last), or another node later changes memory that a dependent node has read.
2. Folding into weights (`rewrite.fold`). (x W + b) scale + shift = x (W scale) + (b scale + shift). Only where the
   Linear or convolution is read by that batch norm alone, and its weights are constants of the network. Only in the
   dependent part: elsewhere the product runs once for all draws, and folding would make it run for each.
3. Working in place (`rewrite.work_in_place`). An activation or sum may overwrite its first operand if that operand is
   a dependent result with memory of its own (no view of anything, nothing a view of it: a view is one more user), and
   this node is its only reader. Then nobody can see the difference, within a draw; and no draw sees another's memory.
4. Stacking draws (`rewrite.is_stackable`). Operations that work value by value or on the last axis do the same to
   (t, N, C) as to (N, C), so t draws go through as they are. Everything else goes through `torch.vmap`, or is refused
   by it, and then draws go one by one.
5. Reusing memory (`rewrite.Buffers`). Stacked products write into buffers kept from pass to pass. A buffer belongs
   to one place in the program, so no result of a pass overwrites another; a pass writes each before it reads it; the
   samples are copied out before the next pass, and buffers are those of one call alone.
6. Fusing in kernels (`mcbn.engine.fuse`). A convolution, the batch norm, shortcut and rectifier behind it become one
   kernel that reads the shortcut when the last of them would have run. Only if each is read by the next alone, and no
   other node in between changes anything in place: the kernel would otherwise read an operand too late, or too early.
7. Leaving out what nobody reads (`matters`). A node without readers stays if it changes memory, which others may read
   under another name. Kernels take the place of nodes that worked in place; those are taken out by name.

None of this is trusted: a plan is used only after it agreed with the network's own code (`mcbn.engine.agree`) on two
draws. The rules are for what two draws of one input cannot show.
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
    again = {node for node in nodes if node.op == "get_attr" or node in both}
    behind = {*later, *again}
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
