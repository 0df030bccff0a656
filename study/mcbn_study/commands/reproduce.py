"""`mcbn reproduce`: the experiments of the paper, and those beyond it; reproduce.toml has their options and help."""

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mcbn.cli.session import command
from mcbn.errors import MCBNError, require_choice

reproduce = typer.Typer(no_args_is_help=True, help="Repeat the experiments of the paper, Teye et al. 2018")
KINDS = {"path": Path, "text": str, "number": int, "names": list[str]}
SWITCHES = ("search_seed", "fresh_draws", "full_batches", "one_stream", "published_mnf")  # fields of a profile
Lines = Iterable[object]
Options = Mapping[str, Any]


def _load(module: str) -> Any:
    """Import a part of the study once it is asked for: `mcbn --help` needs none of it."""
    return import_module(f"mcbn_study.{module}")


def _profile(experiment: str, title: str) -> Any:
    profiles = _load(f"{experiment}.profile").PROFILES
    return profiles[require_choice("profile", title, list(profiles))]


def _report(experiment: str, out: Path) -> Lines:
    return cast(Lines, _load(f"{experiment}.report").write(out))


def regression(profile: str, methods: list[str], **options: Any) -> Lines:
    """Run the study as a profile says, but for its switches."""
    chosen = replace(_profile("regression", profile), **{name: options.pop(name) for name in SWITCHES})
    methods = methods or _load("regression.profile").METHODS
    journal = _load("regression.run").run(chosen, methods=methods, **options)
    return [f"{len(journal.find(kind='test'))} test runs in {journal.path}"]


def sensitivity(profile: str, **options: Any) -> Lines:
    """Run the study with the choices of a regression study."""
    journal = _load("sensitivity").run(_profile("regression", profile), **options)
    return [f"{len(journal.find(kind='sensitivity'))} runs in {journal.path}"]


def coverage(datasets: list[str], out: Path, cifar: bool, networks: Path, device: str) -> Lines:
    """Run on the regression sets, or on CIFAR-10."""
    study = _load("coverage.run")
    if cifar:
        study.run_cifar(networks, out, device=device)
    else:
        study.run(out, datasets=datasets)
    return [study.report(out)]


def posteriors(profile: str, out: Path, cifar: bool, weights: Path, n_test: int, **options: Any) -> Lines:
    """Run on the networks of the regression study, or on one of CIFAR-10."""
    if cifar:
        _load("foreign.run").cifar(weights, out, n_test=n_test)
    else:
        with _load("machine").one_thread("cpu"):
            _load("posteriors.run").run(_profile("regression", profile), out, **options)
    return _report("posteriors", out)


def cifar10(seeds: str, profile: str, out: Path, dropout: float, **options: Any) -> Lines:
    """Train and measure; networks with dropout are trained alone."""
    try:
        numbers = [int(seed) for seed in _split([seeds])]
    except ValueError:
        raise MCBNError(f"seeds are whole numbers separated by commas, such as 1,2,3; got {seeds!r}") from None
    _load("cifar10.run").run(_profile("cifar10", profile), out, seeds=numbers, dropout=dropout, **options)
    return () if dropout else _report("cifar10", out)


def alternatives(networks: Path, out: Path, measure: bool, **options: Any) -> Lines:
    """Measure and time all methods, or only report."""
    if measure:
        if options["foreign"] is not None and not options["foreign"].is_file():
            _load("alternatives.inputs").build_foreign(options["foreign"])
        _load("alternatives.run").run(networks, out, **options)
    return _report("alternatives", out)


def segmentation(dataset: str, device: str, profile: str, out: Path, seed: int, shift: bool) -> Lines:
    """Train and segment one data set, or try its network by night and in fog."""
    chosen = replace(_profile("segmentation", f"{profile} {dataset}"), seed=seed)
    if shift:
        return [_load("segmentation.shift").run(chosen, out / "networks", out.with_name(f"{out.name}_shift"))]
    _load("segmentation.run").run(chosen, out, device=device, echo=typer.echo)
    return _report("segmentation", out)


def shift(out: Path, foreign: Path, frost: Path, profile: str, measure: bool, **options: Any) -> Lines:
    """Measure on shifted inputs, or only report."""
    if measure:
        chosen = _profile("shift", profile)
        inputs = _load("shift.profile").load_inputs(chosen, foreign, frost, options["device"])
        _load("shift.run").run(chosen, inputs, out, **options)
    return _report("shift", out)


def _split(names: list[str] | None) -> list[str]:
    return [name.strip() for text in names or () for name in text.split(",") if name.strip()]


def _parameter(name: str, option: Options) -> inspect.Parameter:
    """Describe an option as typer reads it from a function; one without a default may be left out."""
    default = option.get("default")
    kind: Any = KINDS[option["kind"]] if "kind" in option else type(default)
    flags = [option.get("flag", f"--{name.replace('_', '-')}")] if default is False else []
    told = typer.Option(*flags, help=option["help"], callback=_split if kind == list[str] else None)
    default, kind = (None, kind | None) if default is None else (kind(default), kind)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


def _register(name: str, experiment: Callable[..., Lines | None], words: Options, shared: Options) -> None:
    """Make a command of a function that gives lines to print."""

    def run(**options: Any) -> None:
        if options.get("device") == "auto":
            options["device"] = "cuda" if import_module("torch").cuda.is_available() else "cpu"
        threads = _load("machine").one_thread(options.get("device", "cpu")) if "one_thread" in words else nullcontext()
        with threads:
            for line in experiment(**options) or ():
                typer.echo(line)

    parameters = [
        _parameter(key, option if "help" in option else shared[option.get("like", key)] | option)
        for key, option in words["options"].items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    reproduce.command(name, help=f"{words['help']}\n\n\b\nExample:\n  mcbn reproduce {words['example']}")(command(run))


_WITH_MORE = (regression, sensitivity, coverage, posteriors, cifar10, alternatives, segmentation, shift)
_EXPERIMENTS: dict[str, Callable[..., Lines | None]] = {function.__name__: function for function in _WITH_MORE}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_SHARED = _TABLE.pop("shared")
for _name, _words in _TABLE.items():  # `run` of a module of that name does all there is to do, unless said otherwise
    _module, _, _function = _words.get("call", f"{_name}:run").partition(":")
    _run = _EXPERIMENTS.get(_name) or (lambda of=_module, run=_function, **how: getattr(_load(of), run)(**how))
    _register(_name, _run, _words, _SHARED)
