"""Ray itself: imported where it is needed, connected to within a time limit, and given an MCBN as bytes."""

import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from mcbn.errors import MCBNError, MissingExtraError, one_line
from mcbn.model import MCBN

CONNECT_SECONDS = 10.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, section 3.4
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of type 4


def require_ray(module: str = "ray") -> Any:
    """Import Ray, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"this needs Ray: pip install 'mcbn[ray]' ({error})") from error


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Give Ray, connected: as it already is, to the cluster at an address, or to one of this machine alone.

    RAY_ADDRESS names one where no address is given. A connection made here is closed after.
    """
    ray = require_ray()
    address = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield ray
        return
    if address not in (None, "auto", "local"):
        _require_listening(str(address))
    alone = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **alone)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise MCBNError(
            f"cannot join a Ray cluster at {address or 'this machine'} ({one_line(error)}); start one "
            "with `ray start --head`, or leave the address out to use this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Refuse an address where nothing answers, within seconds: Ray itself would wait for minutes."""
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if host is None or port is None:
        raise MCBNError(f"a Ray address reads host:port, ray://host:port or auto; got {address!r}")
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(HTTP2_PREFACE + HTTP2_SETTINGS)  # which Ray's servers speak
            answer = connection.recv(64)
        if answer[3:4] != HTTP2_SETTINGS[3:4]:
            raise ConnectionError("what listens there is not Ray")
    except OSError as error:
        raise MCBNError(
            f"no Ray cluster answers at {address} within {CONNECT_SECONDS:.0f} seconds ({error}); check it with "
            "`ray status`, or leave the address out to use this machine"
        ) from error


def workers_of(ray: Any, threads: int, asked: int | None) -> tuple[int, int]:
    """Return how many workers run at once, and how many GPUs each has: one where the cluster has any."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    most = gpus or max(1, int(resources.get("CPU", 1)) // threads)
    return asked or most, 1 if gpus else 0


def pack(bayes: MCBN[Any], *more: Any) -> bytes:
    """Serialise an MCBN and more; classes and functions of the user's own files go by value, not by name.

    Other machines may lack those files, and a worker does not start where the user did.
    """
    cloudpickle = require_ray("ray.cloudpickle")
    objects = [*bayes.model.modules(), bayes.inputs, bayes.output, bayes.layers, *more]
    objects += [getattr(item, name, None) for item in more for name in ("dataset", "collate_fn", "reader")]
    objects += [getattr(item, "transform", None) for item in objects]
    names = {str(getattr(item, "__module__", None) or type(item).__module__) for item in objects}
    registered = [sys.modules[name] for name in names if _is_of_the_user(name)]
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


def _is_of_the_user(name: str) -> bool:
    """Tell whether a module is a file of the user's, which other machines need not have, and no installed package."""
    package, path = name.split(".")[0], str(getattr(sys.modules.get(name), "__file__", None) or "")
    installed = package in ("__main__", "torch", "mcbn") or package in sys.stdlib_module_names
    return bool(path) and not installed and "site-packages" not in path and "dist-packages" not in path
