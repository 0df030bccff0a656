"""Lists of operations (`fx` graphs) as code that runs, and that goes when nobody needs it any more."""

import linecache
import weakref

from torch import fx, nn


def matters(node: fx.Node) -> bool:
    """Tell whether a node is needed though nobody reads its result: what it changes in place may be read by others."""
    return node.is_impure() or bool(node.meta.get("changed"))


def as_code(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Turn a list of operations into a module that runs them."""
    module = fx.GraphModule(root, graph)
    free_source(module)
    return module


def free_source(module: fx.GraphModule) -> None:
    """Let the source of a module's present code go with the module: torch keeps that of all code it ever made."""
    weakref.finalize(module, _forget, module.forward.__code__.co_filename).atexit = False


def _forget(file: str) -> None:
    linecache.cache.pop(file, None)
    loader = getattr(fx.graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(file, None)
