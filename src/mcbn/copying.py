"""Private copies of networks and inputs with all they lead to: attributes, items, closures, methods, hooks.

`copy.deepcopy` keeps functions as they are, which go on writing into the user's network that they close over.
"""

import copy
import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from functools import _lru_cache_wrapper, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from mcbn.private_torch import compiled_from, version_of

CONTAINERS = (dict, list, set, deque)
FUNCTIONS = (FunctionType, MethodType, CellType, partial, _lru_cache_wrapper)
STRUCTURE = (*CONTAINERS, *FUNCTIONS, tuple, weakref.ref, nn.Module, Tensor)
LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), os.path.dirname(__file__))
MANY = 10_000  # items of a container that holds data
V = TypeVar("V")


def reachable(root: Any) -> list[tuple[str, Any]]:
    """List all that an object leads to, each once, with the global name or class attribute that leads there, if any."""
    seen, reached = {id(root)}, [("", root)]
    for label, value in reached:  # which grows
        inside = gc.get_referents(value) if not isinstance(value, CONTAINERS) or len(value) < MANY else []
        if isinstance(value, FunctionType) and _is_foreign(value):  # which keep notes of their own as attributes
            inside = [inner for inner in inside if inner is not vars(value)]
        if isinstance(value, _lru_cache_wrapper):  # how much it remembers is nothing of the user's, what it gives is
            memory = [inner for inner in inside if type(inner) is dict and inner is not vars(value)][-1]
            inside = [*(inner for inner in inside if inner is not memory), *memory.values()]
        for name, inner in [*((label, inner) for inner in inside), *_beyond(value)]:
            if id(inner) not in seen and (isinstance(inner, STRUCTURE) or not is_library(type(inner))):  # type: ignore[arg-type]
                seen.add(id(inner))
                reached += [] if isinstance(inner, dict) and "__builtins__" in inner else [(name, inner)]
    return reached


def _beyond(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object leads to that it does not hold: globals of functions, and what a user's classes hold."""
    if isinstance(value, weakref.ref):
        yield "a weak reference", value()
    elif isinstance(value, FunctionType):
        yield from _globals(value)
    elif isinstance(value, nn.Module) or not isinstance(value, STRUCTURE):
        for kind in (kind for kind in type(value).__mro__ if not is_library(kind)):
            for name, inner in vars(kind).items():
                if name == "forward" or (isinstance(inner, (Tensor, *CONTAINERS)) and not name.startswith("__")):
                    yield f"{kind.__name__}.{name}", inner
                elif isinstance(inner, FunctionType):
                    yield from (pair for pair in _globals(inner) if isinstance(pair[1], CONTAINERS))


def _globals(function: FunctionType) -> list[tuple[str, Any]]:
    """List the global objects that a user's function mentions."""
    if _is_foreign(function):
        return []
    names, codes = set[str](), [function.__code__]
    for code in codes:  # which grows
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [(name, function.__globals__[name]) for name in names & function.__globals__.keys()]


def _is_foreign(function: FunctionType) -> bool:
    return any(folder in function.__code__.co_filename for folder in LIBRARIES)


@lru_cache(1024)
def is_library(kind: type) -> bool:
    """Tell classes of Python, of installed packages and of mcbn from a user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", "") or ""
    return kind.__module__ == "builtins" or issubclass(kind, type) or any(folder in file for folder in LIBRARIES)


def private_copy(value: V) -> V:
    """Copy an object with all it leads to; functions that close over parts of it close over their copies."""
    memo, waiting, reached = dict[int, Any](), list[tuple[CellType, Any]](), reachable(value)
    for _, inner in reached:
        if isinstance(inner, Tensor) and not inner.is_leaf:  # the result of a computation, which deepcopy refuses
            memo[id(inner)] = inner.detach().clone()
        elif isinstance(inner, FunctionType) and (inner.__closure__ or compiled_from(inner)):
            memo[id(inner)] = _reopened(inner, waiting)
    twin = copy.deepcopy(value, memo)
    for cell, content in waiting:
        try:
            cell.cell_contents = copy.deepcopy(content, memo)
        except Exception:  # a lock, a file: shared, and where that matters `shared` tells
            cell.cell_contents = content
    return twin


def _reopened(function: FunctionType, waiting: list[tuple[CellType, Any]]) -> FunctionType:
    """Return a function of the same code with empty cells, and add what belongs into them to `waiting`."""
    cells = tuple(CellType() for _ in function.__closure__ or ())
    if source := compiled_from(function):
        waiting.append((cells[0], source))
        return FunctionType(_relay(None).__code__, {}, closure=cells[:1])
    pairs = zip(cells, function.__closure__ or (), strict=True)
    waiting.extend((cell, old.cell_contents) for cell, old in pairs if old != CellType())  # which is not filled yet
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _relay(callee: Any) -> Any:
    return lambda *args, **kwargs: callee(*args, **kwargs)


def shared(value: Any, twin: Any) -> list[tuple[str, Any]]:
    """List modules, tensors and containers that belong to an object as well as to its copy."""
    theirs, kinds = {id(inner) for _, inner in reachable(value)}, (nn.Module, Tensor, *CONTAINERS)
    return [(label, inner) for label, inner in reachable(twin) if id(inner) in theirs and isinstance(inner, kinds)]


def contents_of(module: nn.Module) -> tuple[list[int], list[Any]]:
    """Identify all that modules hold, in containers too, and changes in place; with it, so that no id is given anew."""
    held = [value for child in module.modules() for value in vars(child).values()]
    held += [inner for value in held if isinstance(value, CONTAINERS) for inner in gc.get_referents(value)]
    return [*map(id, held), *(version_of(value) for value in held if isinstance(value, Tensor))], held


class Contents:
    """What a container or a tensor holds at one moment, so that a change to it is seen and undone."""

    def __init__(self, value: Any) -> None:
        self.value, self.before = value, self._of(value)
        self.kept = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)

    @staticmethod
    def _of(value: Any) -> Any:
        return version_of(value) if isinstance(value, Tensor) else list(map(id, gc.get_referents(value)))

    def restore(self) -> bool:
        """Undo what was changed since; tell whether anything was."""
        changed: bool = self._of(self.value) != self.before
        if changed and isinstance(self.value, Tensor):
            self.value.data.copy_(self.kept)
        elif changed:
            self.value.clear()
            (self.value.update if isinstance(self.value, dict | set) else self.value.extend)(self.kept)
        return changed
