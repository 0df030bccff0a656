"""What commands share: mistakes as one line and an exit code, the options of models, a fitted MCBN and its data."""

import io
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from mcbn import batches, saving, scale
from mcbn.baselines import ConstantUncertainty
from mcbn.errors import MCBNError, one_line, require_choice
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.progress import bar, counting
from mcbn.tables import Examples, Layout, open_examples, specs

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes
ENGINES = ("local", "ray")
debugging = ContextVar("debugging", default=False)  # tracebacks are shown

Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Weights = Annotated[Path | None, typer.Option(help="weights of the network: .safetensors, or .pt with a state_dict")]
Target = Annotated[str | None, typer.Option(help="targets by name or place (price; a,b; -1), or array of an npz")]
OwnWeights = Annotated[bool, typer.Option("--own-weights", help="take the network as its factory makes it")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an old result of this command")]
Key = Annotated[str | None, typer.Option(help="columns a,b of a table that are no inputs, such as ids and text")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")]
WatchFile = Annotated[Path | None, typer.Option("--watch", help="the file that `mcbn watch --reference` makes")]
Data = "csv, parquet, npy or npz file, or package.module:loader_factory"


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function: a session with --debug, an option for each field of a dataclass it takes."""
    taken = signature(function).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in taken if is_dataclass(p.annotation)}

    @wraps(function)
    def run(debug: bool, **values: Any) -> None:
        with session(debug):
            for name, group in groups.items():
                values[name] = group(**{field: values.pop(field) for field in signature(group).parameters})
            function(**values)

    grouped = (signature(groups[p.name]).parameters.values() if p.name in groups else [p] for p in taken)
    options = [*chain(*grouped), Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug)]
    run.__signature__ = Signature([p.replace(kind=Parameter.KEYWORD_ONLY) for p in options])  # type: ignore[attr-defined]
    return run


@contextmanager
def session(debug: bool = False) -> Iterator[None]:
    """Run a command: mistakes and warnings as single lines, and nothing half-written if it is told to end."""
    debugging.set(debug or debugging.get())  # a command's own --debug adds to that of `mcbn --debug`
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    with one_line_errors(), one_line_warnings(), _ended_by_sigterm():
        yield


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that what it has begun is taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line: code 2 for mistakes and unusable files, 128 + signal if told to end, else 1."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BaseException as error:
        if debugging.get():
            raise
        line, code = _describe(error)
        typer.echo(f"mcbn: {line}", err=True)
        raise typer.Exit(code) from error


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, MCBNError):
        return one_line(error), MISTAKE
    if isinstance(error, OSError):
        return f"cannot use{f' {error.filename}' if error.filename else ''}: {error.strerror or error}", MISTAKE
    if isinstance(error, KeyboardInterrupt):
        return ("terminated", 128 + signal.SIGTERM) if error.args else ("interrupted", INTERRUPTED)
    return f"{one_line(error)} (--debug shows where)", FAILURE


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each warning meant for users once, as one line."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"mcbn: warning: {' '.join(str(message).removeprefix('mcbn: ').split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("once", UserWarning)
        warnings.showwarning = show
        yield


class Fitted(NamedTuple):
    """A posterior of `mcbn fit` with its network."""

    bayes: MCBN[Any]
    layout: Layout  # of the table it was fitted on
    constant: Tensor | None  # tau of the constant twin, where the file has it

    def open(self, data: str, target: str | None, *, need_targets: bool = True, **options: Any) -> Examples:
        """Open data for this network as `open_examples` does; columns are found by the names of the fit."""
        options |= {"keys": (self.bayes.network or Network(self.bayes.model)).accepted_keys, "fitted": self.layout}
        return open_examples(data, target=target, need_targets=need_targets, **options)

    def save(self, bayes: MCBN[Any], path: Path) -> None:
        """Write the posterior of an MCBN with what is known of tables and the constant twin here."""
        bayes.engine.network.columns = list(self.layout.columns or ())  # for Python, as a table gives them
        notes = {} if self.constant is None else {"constant_tau": json.dumps(self.constant.tolist())}
        bayes.save(path, table=json.dumps(asdict(self.layout)), **notes)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options that name a network."""

    model: Annotated[str, typer.Option(help="package.module:factory; called without arguments, it returns the network")]
    weights: Weights = None
    own_weights: OwnWeights = False
    device: Device = "auto"

    def make(self) -> nn.Module:
        """Make the network."""
        return specs.model(self.model, self.weights, specs.device(self.device), own_weights=self.own_weights)


@dataclass(frozen=True, kw_only=True)
class FittedOptions(NetworkOptions):
    """Options that name a network and its posterior."""

    posterior: Annotated[Path, typer.Option(help="the file that `mcbn fit` wrote")]

    def sources(self, data: str | None) -> dict[str, object]:
        """Name the files that are read, by option."""
        return {"--data": data, "--posterior": self.posterior, "--weights": self.weights}

    def load(self) -> Fitted:
        """Make the network and read its posterior."""
        bayes: MCBN[Any] = MCBN.load(self.posterior, self.make())
        _, metadata = saving.read_tensors(self.posterior)
        constant = metadata.get("constant_tau")
        tau = torch.tensor(json.loads(constant), dtype=torch.float64) if constant else None
        named = {"columns": bayes.engine.network.columns or None}  # of a fit in Python
        return Fitted(bayes, Layout(**json.loads(metadata.get("table", json.dumps(named)))), tau)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options that say how files are read."""

    target: Target = None
    key: Key = None
    transform: Annotated[str | None, typer.Option(help="images: package.module:function, PIL image to tensor")] = None

    @property
    def keys(self) -> list[str]:
        """Columns that are no inputs."""
        return split_names(self.key)

    def of_folder(self, fitted: Fitted) -> dict[str, Any]:
        """Return them as `mcbn.scale` takes them."""
        transform = specs.find(self.transform, "--transform") if self.transform else None
        return {"key": self.keys, "target": self.target, "layout": fitted.layout, "transform": transform}


@dataclass(frozen=True, kw_only=True)
class FolderOptions(FileOptions):
    """Options that say how files are read, and who works on a folder of them."""

    engine: Annotated[str, typer.Option(help="local, or ray: a folder of files, on a cluster")] = "local"
    address: Annotated[str | None, typer.Option(help="ray: the cluster, host:port; by default this machine")] = None
    workers: Annotated[int | None, typer.Option(help="ray: actors; by default one a GPU or CPU")] = None

    def is_many(self, data: str) -> bool:
        """Tell whether data is a job of many files; refuse an engine that does not exist."""
        return require_choice("--engine", self.engine, ENGINES) == "ray" or Path(data).is_dir()

    def predict(self, data: str, fitted: Fitted, **options: Any) -> scale.Summary:
        """Have the files worked on, here or on a cluster."""
        options |= self.of_folder(fitted)
        with bar("predicting", None, "row") as tick:
            options["on_part"] = lambda outcome: tick(outcome.rows)
            if self.engine == "local":
                return scale.predict(data, fitted.bayes, **options)
            from mcbn import ray

            return ray.predict(data, fitted.bayes, address=self.address, workers=self.workers, **options)


def split_names(text: str | None) -> list[str]:
    """Read names a,b,c of an option."""
    return [name.strip() for name in text.split(",")] if text else []


def loader(held_out: Examples) -> DataLoader[Any]:
    """Give inputs and targets of held-out data in batches."""
    if isinstance(held_out.loader, DataLoader):
        return held_out.loader
    blocks: Any = [(block.x, block.y) for block in held_out.blocks()]
    return DataLoader(blocks, batch_size=None)


def tune(bayes: MCBN[Any], held_out: Examples) -> Tensor | None:
    """Tune tau on validation data; for regression return the constant twin's, tuned there too, (D,)."""
    data = loader(held_out)
    total = None if isinstance(data.dataset, IterableDataset) else len(data)
    with bar("tuning", total, "batch") as tick, counting(bayes, tick):
        bayes.tune(data)
    if bayes.task != "regression":
        return None
    twin = ConstantUncertainty(bayes)
    with bar("tuning the constant twin", total, "batch") as tick, counting(twin, tick):
        return torch.as_tensor(twin.tune(data).tau, dtype=torch.float64).reshape(-1)


def read_whole(examples: Examples) -> tuple[Any, Any]:
    """Read inputs and targets of held-out data at once, (N, ...) each; no targets are None."""
    inputs, targets, _ = zip(*examples.blocks(), strict=True)
    return batches.concatenate(inputs), None if any(y is None for y in targets) else torch.cat(targets)
