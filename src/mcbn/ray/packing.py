"""A fitted MCBN as bytes for other machines."""

import sys
from typing import Any

from mcbn.model import MCBN
from mcbn.ray.cluster import require_ray


def pack(bayes: MCBN[Any], *more: Any) -> bytes:
    """Serialise an MCBN and more; classes and functions of the user's own files go by value, not by name.

    Other machines may lack those files, and a worker does not start where the user did.
    """
    cloudpickle = require_ray("ray.cloudpickle")
    parts = [*bayes.model.modules(), bayes.inputs, bayes.output, bayes.layers, *more]
    parts += [getattr(part, name, None) for part in more for name in ("dataset", "collate_fn", "reader")]
    parts += [getattr(part, "transform", None) for part in parts]
    registered = [sys.modules[name] for name in {_module_of(part) for part in parts} if _is_own(name)]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((bayes, *more))  # type: ignore[no-any-return]
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def unpack(payload: bytes) -> Any:
    """Restore what `pack` wrote, as a tuple."""
    return require_ray("ray.cloudpickle").loads(payload)


def _module_of(part: Any) -> str:
    """Name the module of a function or class, or of an object's class."""
    return str(getattr(part, "__module__", None) or type(part).__module__)


def _is_own(name: str) -> bool:
    """Tell whether a module is a file of the user's, which other machines need not have, and no installed package."""
    package, path = name.split(".")[0], str(getattr(sys.modules.get(name), "__file__", None) or "")
    installed = package in ("__main__", "torch", "mcbn") or package in sys.stdlib_module_names
    return bool(path) and not installed and "site-packages" not in path and "dist-packages" not in path
