"""The network as mcbn runs it: a private, frozen copy in eval mode. The user's own object is only ever read."""

import copy
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from mcbn import batches
from mcbn.batching import DEFAULT_BATCH_SIZE
from mcbn.copying import Contents, contents_of, is_library, private_copy, shared
from mcbn.errors import MCBNError
from mcbn.outputs import Ending, OutputReading, recognise
from mcbn.private_torch import COMPILED, held_by
from mcbn.randomness import Undisturbed, isolated_random, iterate

OUTPUT_KEYS = ("out", "logits")
BOXES = "of a detector, a function that gives as many numbers in every draw: boxes come and go"
COPY = "and mcbn runs a private copy so that yours is never touched"
SCALED = "turn whole numbers into floats scaled as in training, such as x / 255 for images"
CURES: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("", lambda x: x),
    ("add the axis of inputs, x[None]", lambda x: x[None]),
    ("put channels before height and width, x.permute(0, 3, 1, 2)", lambda x: x.movedim(3, 1)),
    ("add the axis of inputs and put channels first, x.permute(2, 0, 1)[None]", lambda x: x.movedim(2, 0)[None]),
    ("add the axis of features, x[:, None]", lambda x: x[:, None]),
    ("put inputs on the first axis, x.T", lambda x: x.mT),
)
R = TypeVar("R")
Output = str | int | Callable[[Any], Tensor] | None


def unwrap(model: nn.Module) -> nn.Module:
    """Take off `torch.compile`, DataParallel and DistributedDataParallel; the network inside is what runs."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel) or hasattr(model, COMPILED):
        model = cast(nn.Module, model.module if isinstance(model, parallel) else getattr(model, COMPILED))
    return model


def is_synchronised(model: nn.Module) -> bool:
    """Tell whether a network has SyncBatchNorm layers: one batch is that of all ranks together."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in unwrap(model).modules())


def warn_if_synchronised(model: nn.Module) -> None:
    """Warn that a loader's batch is one rank's, while such a network was trained on the batch of all ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and is_synchronised(model):
        why = f"SyncBatchNorm takes the statistics of all {dist.get_world_size()} ranks together"
        warnings.warn(f"mcbn: {why}: pass M of all as batch_size=, or call mcbn.distributed.fit", stacklevel=3)


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a network whose weights FSDP has spread over processes: no copy of it can run alone."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        gather = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        cure = f"gather them with {gather} of torch.distributed.checkpoint.state_dict into an unsharded network"
        raise MCBNError(f"the network is sharded by FSDP, so no process holds its weights; {cure}")


def snapshot(model: nn.Module) -> tuple[nn.Module, list[tuple[str, Any]]]:
    """Copy a network, frozen and in eval mode throughout; return also what of the user's the copy still leads to."""
    refuse_sharded(model)
    model = unwrap(model)
    try:
        frozen = private_copy(model)
    except Exception as error:
        what = f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error})"
        raise MCBNError(f"{what}, {COPY}: keep open files, locks and generators out of it") from error
    common = shared(model, frozen)
    refuse_other_values(model, frozen)
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    names = {id(value): name or "network" for name, value in named}
    for label, value in common:
        if id(value) in names:
            own = f"your own {names[id(value)]!r} ({label or 'itself'})"
            what = f"a copy of {type(model).__name__} still leads to {own}"
            cure = "not by a global name, a weak reference, a cached method or a __deepcopy__ that returns the original"
            raise MCBNError(f"{what}, {COPY}: reach it through self, {cure}")
    for parent in list(frozen.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, COMPILED):
                setattr(parent, name, unwrap(child))
    frozen.eval()
    for parameter in frozen.parameters():
        if parameter.is_leaf:  # copies of TorchScript parameters are not
            parameter.requires_grad_(False)
    for module in frozen.modules():
        module.training = False  # also where a network overrides train() and keeps parts of it in train mode
    return frozen, common


def structure(model: nn.Module) -> list[str]:
    """List modules with their class and tensors with their shape: what a posterior file must find again."""
    model = unwrap(model)
    names = [f"module {name or '(network)'}: {type(module).__name__}" for name, module in bare_modules(model)]
    entries = model.state_dict().items()  # of quantised layers not only tensors
    sizes = ["x".join(map(str, v.shape)) if isinstance(v, Tensor) else type(v).__name__ for _, v in entries]
    return names + [f"tensor {bare_name(name)}: {size}" for (name, _), size in zip(entries, sizes, strict=True)]


def bare_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List named modules as they are called once compiled parts are unwrapped."""
    return [(bare_name(name), module) for name, module in model.named_modules() if not hasattr(module, COMPILED)]


def bare_name(name: str) -> str:
    """Drop what `torch.compile` puts into the names of modules and tensors."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def refuse_other_values(model: nn.Module, copied: nn.Module) -> None:
    """Refuse a copy with other tensors or settings than the network, as __deepcopy__ and __getstate__ may make it."""
    for (name, module), twin in zip(model.named_modules(), copied.modules(), strict=False):
        kinds = Tensor if is_library(type(module)) else (Tensor, *batches.PLAIN)  # type: ignore[arg-type]
        there, here = map(held_by, (module, twin))
        for key, value in there.items():
            if isinstance(value, kinds) and key[0] != "_" and not _equal(value, here.get(key)):
                what = f"a copy of {type(model).__name__} has another {f'{name}.{key}'.strip('.')!r}, {COPY}"
                raise MCBNError(f"{what}: let __deepcopy__ and __getstate__ keep all that a pass needs")


def _equal(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return isinstance(value, Tensor) or repr(value) == repr(other)
    return isinstance(other, Tensor) and (torch.equal(value, other) or bool((value != value).any()))


class ProcessLock:
    """A lock that every process has for itself: the threads that hold its parent's are not in a forked child."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}  # by process

    def __enter__(self) -> None:
        self._locks.setdefault(os.getpid(), threading.RLock()).acquire()

    def __exit__(self, *error: object) -> None:
        self._locks[os.getpid()].release()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class NotRunError(MCBNError):
    """The network raised an error of its own."""


class Network:
    """A frozen copy of a network with the ways in and out of it: `network(inputs)` gives the output tensor.

    Of a classifier that is its logits, by `reading`, even where it ends in a softmax or sigmoid; `raw` is its own word.
    """

    busy: AbstractContextManager[Any] = nullcontext()  # held by a pass
    settings: Any = None  # what its code reads elsewhere (`mcbn.layers.settings_of`)

    def __init__(self, model: nn.Module, output: Output = None, reading: OutputReading | None = None) -> None:
        self.module, self._of_user = snapshot(model)
        self.output, self.reading = output, reading
        self.proven = self.draws_random = False  # whether one pass showed that it leaves what is the user's alone
        self.columns: list[Any] = []  # names of a table that it was fitted on
        self.left_alone: set[str] | None = None  # who calls batch norm and is not stochastic, where all others are
        self.busy = ProcessLock()  # until a pass shows that it leaves nothing there for another thread's to find
        self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        twin = memo[id(self)] = copy.copy(self)
        twin.module = private_copy(self.module)
        return twin

    def _look(self) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.device = tensors[0].device if tensors else None
        floating = {t.dtype for t in self.module.parameters() if t.is_floating_point()}
        self.dtype = floating.pop() if len(floating) == 1 else None

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> "Network":
        """Return this network on a device and in a floating dtype: a moved copy, or itself where nothing changes."""
        if device in (None, self.device) and dtype in (None, self.dtype):
            return self
        moved = copy.copy(self)
        moved.module = private_copy(self.module).to(device=device, dtype=dtype)
        moved._look()
        return moved

    def prepare(self, inputs: Any) -> Any:
        """Move inputs to the network's device and floating dtype; refuse what is not finite."""
        batches.require_finite(inputs)
        return batches.move(inputs, self.device, self.dtype)

    def over(self, x: Any, run: Callable[[Any], R], join: Callable[[list[R]], R], inputs: batches.Picker = None) -> R:
        """Run on inputs, or on what `inputs` picks of each batch of a loader, and join; they live where inputs do."""

        def run_batch(batch: Any) -> R:
            home = next((t.device for t in batches.tensors_of(batch)), self.device)
            prepared = self.prepare(batch)
            if not self.proven:
                with suppress(NotRunError):  # as it is; draws may
                    self._prove(prepared)
            with self.undisturbed():
                self.settle(prepared)
                result: Any = run(prepared)
            return result if home == self.device else result.to(home)  # type: ignore[no-any-return]

        if not is_stream(x):
            return run_batch(self.gather(list(x) if isinstance(x, Iterator) else x, inputs))
        keys = self.accepted_keys
        return join([run_batch(batches.pick_inputs(batch, inputs, keys)) for batch in iterate(as_loader(x))])

    def undisturbed(self, seed: int | None = None) -> AbstractContextManager[None]:
        """Leave the global generators as they are while a network runs that draws from them."""
        return isolated_random(seed) if self.draws_random else nullcontext()

    def gather(self, data: Any, inputs: batches.Picker = None) -> Any:
        """Make one batch of inputs of a list of batches or of examples; leave alone what forward takes as it is."""
        data = batches.by_name(data, self.columns)
        entries = [batches.tensors_of(entry) for entry in data] if isinstance(data, list) else []
        several = len({entry[0].shape[1:] for entry in entries if entry}) > 1 or len(self.accepted_keys[1]) > 1
        if not entries or (several and self._takes(*data)):
            return data
        whole = self.runs(data[0], inputs)
        try:
            joined = batches.concatenate(data) if whole else default_collate(data)
        except (TypeError, RuntimeError) as error:
            raise MCBNError(f"give tensors of one shape, made as in training; got {batches.describe(data)}") from error
        return batches.pick_inputs(joined, inputs, self.accepted_keys)

    def runs(self, batch: Any, inputs: batches.Picker = None) -> bool:
        """Tell whether the network runs on a batch as it is: what comes in a list may be batches or examples."""
        with suppress(Exception), torch.no_grad(), isolated_random():  # whatever a foreign network says
            self.call_module(self.prepare(batches.pick_inputs(batch, inputs, self.accepted_keys)))
            return True
        return False

    def run_copy(self, inputs: Any) -> Tensor:
        """Run on a copy of prepared inputs: the network may change them in place."""
        if self.proven:
            return self(batches.copied(inputs))
        self._prove(inputs)
        with self.undisturbed():
            return self(batches.copied(inputs))

    def _prove(self, inputs: Any) -> None:
        """Run for the first time: refuse a network that changes what is the user's, warn of one that draws."""
        kept = [(path, value) for path, value in self._of_user if not isinstance(value, nn.Module | nn.Parameter)]
        guarded, undisturbed = [(path, Contents(value)) for path, value in kept], Undisturbed()
        before = contents_of(self.module)
        with torch.no_grad():
            first = undisturbed(lambda: self.raw(inputs), 0, torch.equal)
            if (left := contents_of(self.module))[0] != before[0] and not undisturbed.draws:
                self._warn_if_stateful(inputs, first)
        if changed := [path for path, contents in guarded if contents.restore()]:
            what = f"a pass through {type(self.module).__name__} changes an object of yours that no copy of it has"
            cure = "remove the hook or the global state, or keep it as an attribute of the network"
            raise MCBNError(f"{what}, {changed[0]}; {cure}")
        if undisturbed.draws:
            who = f"{type(self.module).__name__} draws random numbers in eval mode (dropout that stays on?)"
            then = "every draw gets noise of its own, and the global generators are put back after each call"
            warnings.warn(f"mcbn: {who}; {then}", stacklevel=2)
        if contents_of(self.module)[0] == left[0]:
            self.busy = nullcontext()
        self.proven, self.draws_random = True, undisturbed.draws

    def _warn_if_stateful(self, inputs: Any, first: Tensor) -> None:
        """Run other inputs, and the same again, on a network that a pass changed: is the result what it was?"""
        from mcbn.engine.agree import agree

        with suppress(MCBNError):  # it takes no other
            self.raw(batches.map_tensors(lambda t: t.flip(0) if t.ndim else t, inputs))
            again = self.raw(inputs)
            if first.shape != again.shape or not agree(again.nan_to_num(), first.nan_to_num()):
                who = f"{type(self.module).__name__} keeps a state from call to call, so draws depend on those before"
                warnings.warn(f"mcbn: {who}; reset it in forward, or give it as an input", stacklevel=2)

    def settle(self, inputs: Any) -> None:
        """Find out on the first prepared inputs whether the network gives logits or probabilities."""
        if self.reading is None or self.reading.kind != "auto":
            return
        try:
            with torch.no_grad(), isolated_random(), Ending() as mode:
                output = pick_output(self.call_module(batches.copied(inputs)), self.output)
        except (RuntimeError, ValueError):  # whoever runs it next is told, or runs it with the statistics of a draw
            return
        if output.numel():
            self.reading = self.reading._replace(kind=recognise(output, mode.of(output), self.reading.several))

    def read(self, result: Any) -> Tensor:
        """Pick the output tensor (N, ...) of what the network returned, of classes as logits."""
        output = pick_output(result, self.output)
        return output if self.reading is None else self.reading.logits(output)

    def raw(self, inputs: Any) -> Tensor:
        """Run on a copy of prepared inputs and return what the network itself gives, (N, ...)."""
        return pick_output(self._run(batches.copied(inputs)), self.output).clone()  # it may be the network's own

    def __call__(self, inputs: Any) -> Tensor:
        """Run the network on prepared inputs and read its output."""
        return self.read(self._run(inputs))

    def _run(self, inputs: Any) -> Any:
        try:
            return self.call_module(inputs)
        except (MCBNError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"{type(self.module).__name__} could not run on what it was given, {batches.describe(inputs)}"
            cure = "if that is not what it takes, pass inputs= (a key, an index, a list of them, or a function)"
            raise NotRunError(f"{self._cure(inputs)}{what} ({type(error).__name__}: {error}); {cure}") from error

    def _cure(self, inputs: Any) -> str:
        """Name the first of the usual cures that lets the network run; empty where none does."""
        first = inputs[0] if isinstance(inputs, tuple | list) and inputs else inputs
        if first is not inputs and self.runs([first]):
            return "give the inputs alone, without the targets: "
        if isinstance(inputs, Mapping):
            return next((f"pass inputs={key!r}: " for key, value in inputs.items() if self.runs([value])), "")
        if not isinstance(inputs, Tensor):
            return "" if batches.tensors_of(inputs) else "give a tensor of numbers, made as in training: "
        scaled = "" if inputs.is_floating_point() else SCALED
        x = inputs if inputs.is_floating_point() else inputs.to(self.dtype or torch.float32)
        for words, change in CURES:
            with suppress(Exception):
                if (words or scaled) and self.runs([change(x)]):
                    return f"{' and '.join(filter(None, (scaled, words)))}: "
        return ""

    def call_module(self, inputs: Any) -> Any:
        """Call with one value, or spread a tuple or dict that fits the signature of forward."""
        with self.busy:
            if isinstance(inputs, Mapping) and self._takes(**inputs):
                return self.module(**inputs)
            if isinstance(inputs, tuple | list) and self._takes(*inputs):
                return self.module(*inputs)
            return self.module(inputs)

    def _takes(self, *args: Any, **kwargs: Any) -> bool:
        with suppress(TypeError):
            inspect.signature(self.module.forward).bind(*args, **kwargs)
            return True
        return False

    @cached_property
    def accepted_keys(self) -> tuple[list[str], list[str]]:
        """Return the argument names of forward: all that can be given by name, and those that must be."""
        parameters = inspect.signature(self.module.forward).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return [p.name for p in named], [p.name for p in named if p.default is p.empty]


def is_stream(x: Any) -> bool:
    """Tell data that give batches from inputs themselves."""
    return isinstance(x, DataLoader | Dataset)


def as_loader(data: Any) -> Any:
    """Read a Dataset in batches; a DataLoader or a list of batches (x, y) stays as it is, all else is one batch."""
    several = isinstance(data, list) and all(isinstance(batch, tuple | Mapping) for batch in data)
    ready = data if several or isinstance(data, DataLoader) else [data]
    return DataLoader(data, batch_size=DEFAULT_BATCH_SIZE) if isinstance(data, Dataset) else ready


def read_place(device: Any, dtype: torch.dtype | None) -> tuple[torch.device | None, torch.dtype | None]:
    """Read the arguments of `to` as a module does."""
    if isinstance(device, Tensor):
        device, dtype = device.device, device.dtype
    elif isinstance(device, torch.dtype):
        device, dtype = None, device
    if dtype is not None and not dtype.is_floating_point:
        raise MCBNError(f"to takes a floating dtype, got {dtype}; a network cannot run in it")
    try:
        return None if device is None else torch.device(device), dtype
    except (RuntimeError, TypeError) as error:
        raise MCBNError(f'to takes a device such as "cpu" or "cuda:0", or a floating dtype; got {device!r}') from error


def pick_output(result: Any, output: Output = None) -> Tensor:
    """Find the output tensor in what the network returned: by `output`, else the tensor itself, "out" or "logits"."""
    picked = result
    if callable(output):
        picked = output(result)
    elif output is not None:
        picked = _lookup(result, output)
    elif not isinstance(result, Tensor):
        only = result[0] if isinstance(result, tuple | list) and len(result) == 1 else result
        picked = next((entry for key in OUTPUT_KEYS if (entry := _lookup(result, key)) is not None), only)
    if not isinstance(picked, Tensor):
        boxes = isinstance(result, list) and any(isinstance(entry, dict) for entry in result)
        cure = "a function of it" if not boxes else BOXES
        what = f"the network returned {batches.describe(result)}, of which output={output!r} gives no tensor"
        raise MCBNError(f"{what}; pass output= (a key, an index, or {cure})")
    if picked.is_complex():
        raise MCBNError("the network gives complex numbers, which have no order; pass output=torch.view_as_real, say")
    return picked


def _lookup(result: Any, key: str | int) -> Any:
    with suppress(KeyError, IndexError, AttributeError, TypeError):
        if isinstance(key, str) and not isinstance(result, Mapping):
            return getattr(result, key)
        return result[key]
    return None
