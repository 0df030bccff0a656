"""Which layers are stochastic: those that could be, those that a pass runs, and those that `layers=` chooses."""

import gc
import os
import sys
import warnings
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dis import get_instructions
from functools import _lru_cache_wrapper, partial
from itertools import pairwise
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ref as weakref

import numpy as np
import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.batch_norm import Survey
from mcbn.copying import LIBRARIES, is_library
from mcbn.errors import MCBNError
from mcbn.network import Network, bare_modules, bare_name
from mcbn.private_torch import AnyBatchNorm, global_hooks, hooks_of

Layers = int | Sequence[str] | Callable[[str, nn.Module], bool] | None
DEPTH = 3  # of containers in containers that are looked into
MANY = 1000  # entries of a setting: of longer ones which objects they are, not what each holds
MODULE = vars(nn.Module()).keys() - {"training"}
CONTROL = {"cond", "while_loop", "scan"}  # of torch.compile's kind: no mode may watch its operators
CLASSES = {"__init_subclass__", "__set_name__", "__class_getitem__"}  # run where a class is made
MAKING = {"__init__", "__new__", "__repr__", "__str__", "__getstate__", "__setstate__", "__reduce__", "__deepcopy__"}
# Names of functions that get past all that watches
UNSEEN = {"globals", "exec", "eval", "__import__", "to_dlpack", "_to_dlpack", "get_num_threads", "initial_seed"}
UNSEEN |= {"is_anomaly_enabled", "get_printoptions", "PRINT_OPTS"}
UNSEEN |= {"open", "read_text", "read_bytes", "loadtxt", "load", "fromfile", "exists", "is_file", "set_default_dtype"}
KNOWN = ("torch", "builtins", "collections", "functools", "typing", "dataclasses", "enum", "abc")  # whose code is known
NAMED = (FunctionType, BuiltinFunctionType, ModuleType, type)
BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
CLOCKS = {"time", "datetime", "secrets", "uuid", "decimal", "sys", "gc", "importlib", "posix", "posixpath"}
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "asyncio", "queue", "ctypes", "subprocess"}


def candidates(module: nn.Module) -> list[str]:
    """Name the modules that are batch norm, or whose code calls the function: all that could be stochastic."""
    if any(nn.parameter.is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        raise MCBNError("the network has lazy layers that are not initialised; run one batch through it first")
    names = [
        name
        for name, child in bare_modules(module)
        if isinstance(child, AnyBatchNorm) or any("batch_norm" in code.co_names for code in _codes(child))
    ]
    if not names:
        norms = Counter(type(child).__name__ for child in module.modules() if "norm" in type(child).__name__.lower())
        seen = ", ".join(f"{count} x {name}" for name, count in norms.items()) or "no normalisation layer of any kind"
        script = any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())
        hint = "; TorchScript hides its layers: pass the original module" if script else ""
        if any(name.startswith("Frozen") for name in norms):
            hint = "; put torch.nn.BatchNorm2d with the same weights and buffers in the place of frozen layers"
        what = f"{type(module).__name__} has no batch norm layer (it has: {seen}), so no batch statistics to draw"
        raise MCBNError(f"{what}; MCBN needs a network that was trained with batch normalisation{hint}")
    return names


def _codes(module: nn.Module, *, called: bool = False) -> dict[CodeType, dict[str, Any]]:
    """Find the code that a module's class and the objects it holds can reach by name, each with its global names.

    called: of methods those alone that `forward`, a hook or another one that they call names, and none of torch's own.
    """
    methods = [(name, f) for name, f in _methods(module) if not _is_entry(name)] if called else []
    waiting = [(f.__code__, f.__globals__) for f in _functions(module, called=called)]
    codes: dict[CodeType, dict[str, Any]] = {}
    while waiting:
        code, names = waiting.pop()
        if code not in codes:
            codes[code] = names
            values = _values(code, names)
            named = [f for name, f in methods if name in code.co_names]
            objects = (v for v in values if not (isinstance(v, type) and issubclass(v, nn.Module)))
            plain = (pair for cls in _classes(*objects) if _is_own(cls) for pair in _plain(cls))
            named += [f for n, f in plain if n in ("forward", *code.co_names) or (n[:2] == "__" and n not in CLASSES)]
            waiting += [(const, names) for const in code.co_consts if isinstance(const, CodeType)]
            functions = (f for f in (*values, *_held(named)) if isinstance(f, FunctionType))
            found = ((f.__code__, f.__globals__) for f in functions)
            waiting += [pair for pair in found if not (called and pair[1].get("__name__", "").split(".")[0] in KNOWN)]
    return codes


def _values(code: CodeType, names: Mapping[str, Any]) -> list[Any]:
    """List what code names, in the user's modules that it names too, and what that holds."""
    spaces = [names, *(vars(module) for module in _modules(code, names) if _is_own(module))]
    return _held(space[name] for space in spaces for name in code.co_names if name in space)


def _held(values: Iterable[Any]) -> list[Any]:
    """List values and what they hold, those that compare by value apart: as deep, and as many, as is looked into."""
    reached, found = dict[int, Any](), [*values]
    for _ in range(DEPTH):
        new = {id(v): v for v in found[:MANY] if not isinstance(v, (*batches.PLAIN, Tensor)) and id(v) not in reached}
        reached |= new
        found = [inner for value in new.values() for inner in _inside(value) or ()]
    return [*reached.values()]


def _modules(code: CodeType, names: Mapping[str, Any]) -> list[ModuleType]:
    """List the modules that code names or imports."""
    imported = {n: sys.modules[n] for n in code.co_names if n in sys.modules and n not in names}
    if imported:
        wanted = {step.argval for step in get_instructions(code) if step.opname == "IMPORT_NAME"}
        imported = {name: module for name, module in imported.items() if name in wanted}
    return [*imported.values(), *(names[n] for n in code.co_names if isinstance(names.get(n), ModuleType))]


def _methods(module: nn.Module) -> list[tuple[str, FunctionType]]:
    """List the functions of a module's class and of the classes of objects it holds, properties too, by name."""
    inherited = (value for cls in _classes(module) for value in vars(cls).values())  # properties of the user's kinds
    owners = [module, *(v for v in _held((*attributes_of(module), *inherited)) if not isinstance(v, nn.Module))]
    return [pair for cls in _classes(*owners) for pair in _plain(cls)]


def attributes_of(module: nn.Module) -> list[Any]:
    """List what a module holds beside its parameters, buffers and children."""
    return [value for name, value in vars(module).items() if name not in MODULE]


def _plain(cls: type) -> list[tuple[str, FunctionType]]:
    """List the functions of a class, properties too, by name."""
    kinds = ("fget", "__func__", "func")  # of properties and methods, and of those that functools makes
    held = ((n, next((getattr(v, kind) for kind in kinds if hasattr(v, kind)), v)) for n, v in vars(cls).items())
    return [(name, f) for name, f in held if isinstance(f, FunctionType)]


def _is_entry(name: str) -> bool:
    """Tell methods that a pass begins with, or that Python calls, from those that code must name."""
    return name == "forward" or (name[:2] == "__" and name not in MAKING | CLASSES)


def _functions(module: nn.Module, *, called: bool = False) -> list[FunctionType]:
    """List a module's methods (called: its entries), functions it holds, its hooks, and what these close over."""
    methods = (f for name, f in _methods(module) if not called or _is_entry(name))
    held = _held((*methods, *attributes_of(module), *hooks_of(module)))
    return [f for f in held if isinstance(f, FunctionType) and f.__module__ != Survey.__module__]


def _classes(*owners: Any) -> set[type]:
    """Find the classes of objects, and classes that are among them, the libraries' apart."""
    kinds = {kind for owner in owners for kind in (type(owner), owner) if isinstance(kind, type)}
    return {cls for kind in kinds for cls in kind.__mro__ if cls.__module__.split(".")[0] not in KNOWN}


class Settings:
    """What the code of a network names outside it (globals, closures, attributes): plans hold while that stays."""

    def __init__(self, network: Network) -> None:
        self.module, self.output, ending = network.module, network.output, nn.Module()
        vars(ending)["output"] = network.output
        children = [*network.module.modules(), ending]
        codes = [pair for child in children for pair in _codes(child, called=True).items()]
        spaces: list[tuple[Any, Any, Iterable[str]]] = [(cls, vars(cls), vars(cls)) for cls in _classes(*children)]
        functions = {id(f): f for child in children for f in _functions(child)}
        for code, names in codes:
            values = _values(code, names)
            functions |= {id(v): v for v in values if isinstance(v, FunctionType) and _is_own(v)}
            owners = [*_modules(code, names), *_classes(*values), *(v for v in values if isinstance(v, FunctionType))]
            spaces.append((names, names, code.co_names))
            spaces += [(o, vars(o), vars(o) if _is_own(o) else code.co_names) for o in owners]  # by any name made up
        there = ((id(owner), space, n) for owner, space, named in spaces for n in named if n in space)
        present = {(owner, n): (partial(space.get, n), n, space[n]) for owner, space, n in there if n[:2] != "__"}
        self.spaces = [*{id(owner): space for owner, space, _ in spaces}.values()]
        called = {name for code, _ in codes for name in code.co_names}
        reads = called | {name for code, _ in codes for name in code.co_consts if isinstance(name, str)}
        cells = [cell for f in functions.values() for cell in f.__closure__ or () if cell != CellType()]
        given = [(f, n) for f in functions.values() for n in ("__code__", "__defaults__", "__kwdefaults__")]  # reloaded
        known: list[tuple[Callable[[], Any], str, Any]]
        known = [(partial(getattr, cell, "cell_contents"), "a closure", cell.cell_contents) for cell in cells]
        known += [(partial(getattr, f, n), "a default", getattr(f, n)) for f, n in given]
        known += [(partial(getattr, os, "environ"), "getenv", os.environ)] * ("getenv" in called)
        known.append((partial(getattr, self, "output"), "output", self.output))
        held = [(m.__name__, m) for code, names in codes for m in _modules(code, names)]
        held += [*((n, value) for _, n, value in known), *(pair for child in children for pair in vars(child).items())]
        held += [(n, value) for _, n, value in present.values() if n in reads]
        self.changing = min(called & UNSEEN, default="") or next((name for name, value in held if _changes(value)), "")
        known += present.values()
        self.by_value = [get for get, _, value in known if _compares(value)]
        self.by_id = [(get, value) for get, _, value in known if not _compares(value)]  # alive: none else has their ids
        self.sizes, self.values = self.now()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy finds them again

    def now(self) -> tuple[list[int], Any]:
        """Return how many names there are, and what these hold as a value that compares and hashes."""
        ids = tuple([id(get()) for get, _ in self.by_id])
        return [*map(len, self.spaces)], (ids, tuple([identify(get()) for get in self.by_value]), global_hooks())


def _is_own(owner: Any) -> bool:
    """Tell whether a function, class or module is a user's."""
    home = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
    file = getattr(home, "__file__", None) or ("" if getattr(home, "__spec__", None) is None else "<builtin>")
    return (file.endswith(".py") or not file) and not any(folder in file for folder in LIBRARIES)


def settings_of(network: Network) -> Settings:
    """Return where the settings of a network are."""
    kept: Settings | None = network.settings  # there: what code closes over may lead to the network
    same = kept is not None and kept.module is network.module and kept.output is network.output
    if kept is None or not same or kept.now() != (kept.sizes, kept.values):  # may lead elsewhere
        kept = network.settings = Settings(network)
    return kept


def identify(value: Any, depth: int = DEPTH) -> Any:
    """Return a value that compares and hashes: plain ones and what objects hold by value, functions by what they are.

    Of tensors nothing is told: a trace sees what is done with them.
    """
    if isinstance(value, batches.PLAIN):
        return type(value), repr(value)
    kind, inside = type(value), _inside(value)
    alike = getattr(kind, "__eq__", 0) is not object.__eq__ or kind.__module__ == "torch"  # by value, or one of a name
    if inside is None and alike and not isinstance(value, (Tensor, *NAMED)):
        return kind, repr(value)
    name = value if isinstance(value, (*NAMED, nn.Module)) else kind  # itself: an id may be another's later
    if inside is None or not depth:
        return name
    return name, *(map(id, inside) if len(inside) > MANY else (identify(inner, depth - 1) for inner in inside))


def _inside(value: Any) -> list[Any] | None:
    """List what a value holds, of a module or a library's object plain ones and functions alone; None if it cannot."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return sorted(value, key=repr) if isinstance(value, set | frozenset) else [*value]
    if isinstance(value, ContextVar):
        return [value.get(None)]
    if isinstance(value, weakref):
        return [value()]
    if isinstance(value, _lru_cache_wrapper):  # what it has given so far; a use moves it to the end
        return sorted(gc.get_referents(value), key=id)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, BOUND) and not isinstance(value.__self__, ModuleType | type | None):
        return [getattr(value, "__func__", None), value.__self__]
    if isinstance(value, bytearray | array | memoryview):
        return [zlib.crc32(bytes(value))]
    if hasattr(type(value), "__array__") and not isinstance(value, Tensor):  # an array or a table
        numbers = np.asarray(value)
        return [*numbers.flat[: MANY + 1].tolist()] if numbers.dtype == object else [zlib.crc32(numbers.tobytes())]
    if isinstance(value, Tensor | type | ModuleType):
        return None
    slots = (n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ()) if hasattr(value, n))
    held = [*(getattr(value, n) for n in slots), *getattr(value, "__dict__", {}).values()]
    cells = [cell for cell in value.__closure__ or () if cell != CellType()] if isinstance(value, FunctionType) else []
    held += [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType)]
    kind = type(value)  # of Python's some hold what a user put there
    is_own = kind.__module__ in ("types", "argparse", "collections") or not is_library(kind)  # type: ignore[arg-type]
    is_own = isinstance(value, FunctionType) or (is_own and not isinstance(value, nn.Module))
    held = held if is_own else [inner for inner in held if isinstance(inner, (*batches.PLAIN, FunctionType))]
    return held if held or (is_own and hasattr(value, "__dict__") and not isinstance(value, FunctionType)) else None


def _compares(value: Any) -> bool:
    return isinstance(value, batches.PLAIN) or _inside(value) is not None


def _changes(value: Any, depth: int = DEPTH) -> bool:
    """Tell what may give something else each time it is asked: clocks, threads, generators of numbers, iterators.

    Also what holds such, and what holds others deeper, or more of them, than is looked at.
    """
    home = str(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", type(value).__module__))
    if isinstance(value, Iterator) or home.split(".")[0] in THREADS:
        return True
    if home.split(".")[0] in CLOCKS if isinstance(value, NAMED) else home.startswith(("random", "numpy.random")):
        return True
    inside = None if isinstance(value, batches.PLAIN) else _inside(value)
    if inside is None or (depth and not inside):
        return False
    few = inside[: MANY + 1] if len(inside) > MANY else inside
    return not depth or any(_changes(inner, depth - 1 if len(inside) <= MANY else 0) for inner in few)


def choose(layers: Layers, names: Sequence[str], module: nn.Module) -> list[str]:
    """Resolve `layers=` against the batch-norm layers of these names, in calling order where they are."""
    modules = dict(bare_modules(module))
    if layers is None:
        return list(names)
    if callable(layers):
        chosen = [name for name in names if layers(name, modules[name])]
    elif isinstance(layers, int) and not isinstance(layers, bool) and layers > 0:
        chosen = list(names[:layers])
    elif isinstance(layers, Sequence) and not isinstance(layers, str) and layers:
        known = {bare_name(name): child for name, child in module.named_modules(remove_duplicate=False)}
        wanted = {n: known.get(bare_name(n), known.get(bare_name(n).removeprefix("module."))) for n in layers}
        if missing := [n for n, child in wanted.items() if child not in [modules[norm] for norm in names]]:
            raise MCBNError(f"layers= names {missing[0]!r}, which is not a batch norm layer; there are {list(names)}")
        chosen = [name for name in names if modules[name] in wanted.values()]
    else:
        raise MCBNError(f"layers= must be None, a positive number, a list of names or f(name, module); got {layers!r}")
    if not chosen:
        raise MCBNError(f"layers= matches no batch norm layer; there are {list(names)}")
    return chosen


def refuse_scripted(module: nn.Module) -> None:
    """Refuse batch norm inside TorchScript: its calls cannot be seen, so it would stay deterministic in silence."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and "BatchNorm" in getattr(child, "original_name", ""):
            raise MCBNError(f"layer {name!r} is batch norm inside TorchScript, which hides it; pass the module itself")


def stochastic_layers(network: Network, x: Any, layers: Layers) -> frozenset[str]:
    """Run the network once as it is to see which layers call batch norm, and choose among them."""
    refuse_scripted(network.module)
    survey = Survey(batches.tensors_of(x), network.module)
    with torch.no_grad(), survey:
        network.run_copy(x)
    norms = [name for name, child in network.module.named_modules() if isinstance(child, AnyBatchNorm)]
    names = [*survey.layers, *(n for n in norms if n in survey.entered and n not in survey.layers)]  # own arithmetic
    if not names:
        unused = f"its layers {candidates(network.module)} are not used in eval mode"
        raise MCBNError(f"{type(network.module).__name__} ran without a single batch norm call; {unused}")
    chosen = choose(layers, names, network.module)
    _refuse_unusable(network.module, survey, chosen)
    controls = (_controls(*pair) for child in network.module.modules() for pair in _codes(child).items())
    with network.undisturbed():
        unseen = survey.unseen(network.run_copy, x) if layers is None and not any(controls) else {}
    for name, how in unseen.items():
        kept = f"runs {how}, where it cannot be set, so it keeps its running statistics and adds no uncertainty"
        cure = "call torch.nn.functional.batch_norm in the thread that runs the network, or choose layers with layers="
        warnings.warn(f"mcbn: batch norm of {name or 'the network'!r} {kept}; {cure}", stacklevel=4)
    for name, has_running in survey.layers.items():
        if name not in chosen and not has_running:
            how = "has no running statistics, so it goes on using those of whatever batch it is given"
            warnings.warn(f"mcbn: layer {name!r} is not among layers= and {how}", stacklevel=4)
    network.left_alone = survey.calls.keys() - survey.layers.keys() if layers is None else None
    others = [n for n, child in bare_modules(network.module) if layers is None and isinstance(child, AnyBatchNorm)]
    return frozenset((*chosen, *others))  # others: on a path that this pass did not take


def _controls(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Tell whether code names control flow of torch, `torch.cond` say, not an attribute of the same name."""
    steps = ["", *(step.argval for step in get_instructions(code))] if CONTROL & {*code.co_names} else []
    return any(step in CONTROL and (step in names or before in names) for before, step in pairwise(steps))


def _refuse_unusable(module: nn.Module, survey: Survey, chosen: Sequence[str]) -> None:
    """Refuse chosen layers that do their own arithmetic, and a batch that is normalised in pieces."""
    for name in chosen:
        if name not in survey.layers:
            what = f"layer {name!r} ({type(module.get_submodule(name)).__name__}) does its own arithmetic"
            cure = "call torch.nn.functional.batch_norm, whose statistics can be set, or leave it out with layers="
            raise MCBNError(f"{what}; {cure}")
    for name, rows in survey.pieces.items():
        if name in chosen:
            what = f"layer {name!r} normalises a batch of {survey.rows} in pieces of {rows} (ghost batch norm)"
            raise MCBNError(f"{what}; pass batch_size={rows} to fit, as in training: predict takes any number")
