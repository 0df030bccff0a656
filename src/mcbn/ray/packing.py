"""A fitted MCBN as bytes for other machines."""

import sys
from typing import Any

import torch

from mcbn.model import MCBN
from mcbn.ray.cluster import require_ray
from mcbn.scale.job import on_device


def pack(bayes: MCBN[Any]) -> bytes:
    """Serialise a fitted MCBN, on the CPU and without the network it was made from."""
    return dumps_with(on_device(bayes, torch.device("cpu")))


def dumps_with(bayes: MCBN[Any], *more: Any) -> bytes:
    """Serialise an MCBN and more; classes of the user's own files go by value, as other machines may lack them."""
    cloudpickle = require_ray("ray.cloudpickle")
    owners = [*bayes.model.modules(), *more, *(getattr(value, "dataset", None) for value in more)]
    own = {name for owner in owners if _is_own(name := type(owner).__module__)}
    registered = [sys.modules[name] for name in own]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((bayes, *more) if more else bayes)  # type: ignore[no-any-return]
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str) -> bool:
    """Tell whether a module is a file of the user's, which other machines need not have, and no installed package."""
    path = getattr(sys.modules.get(name), "__file__", None)
    installed = name == "__main__" or name.split(".")[0] in ("torch", "mcbn")
    return bool(path) and not installed and "site-packages" not in str(path) and not str(path).startswith(sys.prefix)


def unpack(payload: bytes) -> MCBN[Any]:
    """Restore what `pack` wrote, on the GPU that Ray gave this worker, else on the CPU."""
    cloudpickle = require_ray("ray.cloudpickle")
    bayes: MCBN[Any] = cloudpickle.loads(payload)
    return on_device(bayes, torch.device("cuda")) if torch.cuda.is_available() else bayes
