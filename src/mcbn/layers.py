"""Which layers are stochastic: those that could be, those that a pass runs, and those that `layers=` chooses."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.batch_norm import Survey
from mcbn.errors import MCBNError
from mcbn.network import Network, bare_modules, bare_name
from mcbn.private_torch import AnyBatchNorm

Layers = int | Sequence[str] | Callable[[str, nn.Module], bool] | None
LONGEST_SETTING = 1000  # as text: longer ones are tables
_settings: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # of networks: where their settings are
CONTROL = {"cond", "while_loop", "scan"}  # of torch.compile's kind: no mode may watch its operators
LIBRARIES = ("torch", "builtins", "collections", "functools", "typing")  # whose code is known


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


def _codes(module: nn.Module) -> dict[CodeType, dict[str, Any]]:
    """Find the code that a module's class and the objects it holds can reach by name, each with its global names."""
    waiting = [(f.__code__, f.__globals__) for f in _functions(module)]
    codes: dict[CodeType, dict[str, Any]] = {}
    while waiting:
        code, names = waiting.pop()
        if code not in codes:
            codes[code] = names
            called = (inspect.unwrap(names[n]) for n in code.co_names if isinstance(names.get(n), FunctionType))
            waiting += [(const, names) for const in code.co_consts if isinstance(const, CodeType)]
            waiting += [(f.__code__, f.__globals__) for f in called if isinstance(f, FunctionType)]
    return codes


def _functions(module: nn.Module) -> list[FunctionType]:
    """List the functions of a module's class and of the objects it holds, and functions that these close over."""
    owners = [module, *(v for v in vars(module).values() if not isinstance(v, Tensor | nn.Module))]
    held = [*(f for cls in _classes(*owners) for f in vars(cls).values()), *owners]
    functions = [f for f in held if isinstance(f, FunctionType)]
    for function in functions:  # grows on the way
        inner = (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
        functions += [f for f in inner if isinstance(f, FunctionType) and f not in functions]
    return functions


def _classes(*owners: Any) -> set[type]:
    """Find the classes of objects, the libraries' apart."""
    return {cls for owner in owners for cls in type(owner).__mro__ if cls.__module__.split(".")[0] not in LIBRARIES}


def settings_of(module: nn.Module) -> Any:
    """Return the plain values outside a network that its code names (globals, closures): plans hold while they stay."""
    if module not in _settings:
        children = list(module.modules())
        spaces: list[tuple[Any, Any]] = [(vars(cls), tuple(vars(cls))) for cls in _classes(*children)]
        for code, names in [pair for child in children for pair in _codes(child).items()]:
            objects = [vars(value) for value in map(names.get, code.co_names) if _holds(value)]
            spaces += [(space, code.co_names) for space in (names, *objects)]
        cells = [c for child in children for f in _functions(child) for c in f.__closure__ or () if c != CellType()]
        spaces += [(vars(o), tuple(vars(o))) for o in (cell.cell_contents for cell in cells) if _holds(o)]
        named = {(id(space), n): partial(space.get, n) for space, ns in spaces for n in ns if _is_setting(space.get(n))}
        closed = [partial(getattr, cell, "cell_contents") for cell in cells if _is_setting(cell.cell_contents)]
        _settings[module] = [*named.values(), *closed]
    values = [value() for value in _settings[module]]
    return batches.outline(values) if values else ()


def _holds(value: Any) -> bool:
    """Tell an object with attributes from functions, classes, tensors and networks."""
    return hasattr(value, "__dict__") and not isinstance(value, FunctionType | type | Tensor | nn.Module)


def _is_setting(value: Any) -> bool:
    plain = value is not None and batches.is_plain(value) and not batches.tensors_of(value)
    return plain and len(str(value)) < LONGEST_SETTING


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
        missing = [name for name, child in wanted.items() if child not in [modules[norm] for norm in names]]
        if missing:
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
    names_used = {name for child in network.module.modules() for code in _codes(child) for name in code.co_names}
    watchable = layers is None and not names_used & CONTROL
    with network.undisturbed():
        unseen = survey.unseen(network.run_copy, x) if watchable else {}
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
