"""Stand-ins for torchvision and torchaudio where they are missing: names to import, nothing that runs.

timm, pytorchcv, segmentation_models_pytorch and braindecode import them for loading data and for a few operations that
the zoo's networks do not use. Both are tied to one build of torch; with the stand-ins the networks can do without.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

NAMES = ("torchvision", "torchaudio")


class _Kind(type):
    """A class whose attributes are their own names: members of an enumeration, say."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _name(module: ModuleType, name: str) -> Any:
    """Make of any name of a module a class of its own that cannot be used."""
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(module, name, _Kind(name, (nn.Module,), {"__init__": _refuse}))
    return getattr(module, name)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ImportError(f"{type(self).__name__} is of torchvision or torchaudio, which is not installed")


class _Finder(MetaPathFinder, Loader):
    """Answers imports of some packages, and of everything inside them, by modules of names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Take over the packages named, and no other."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        """Let every name be there."""
        module.__dict__["__getattr__"] = partial(_name, module)


def _forget(names: Sequence[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        del sys.modules[name]


@contextmanager
def standing_in() -> Iterator[list[str]]:
    """Let imports of what is missing succeed in this block, and say what that was; afterwards it is missing again."""
    names = []
    for name in NAMES:
        try:
            importlib.import_module(name)
        except Exception:  # missing, or built for another torch: OSError, RuntimeError
            names.append(name)
    _forget(names)
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield names
    finally:
        sys.meta_path.remove(finder)
        _forget(names)
