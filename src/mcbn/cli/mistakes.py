"""What a person sees when something is wrong: one line and an exit code, a traceback only with --debug."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import typer

from mcbn.errors import MCBNError

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130
_debug = ContextVar("debug", default=False)


def set_debug(value: bool) -> bool:
    """Show tracebacks from here on; a command's own --debug adds to that of `mcbn --debug`."""
    if value:
        _debug.set(True)
    return value


def begin(debug: bool) -> None:
    """Start a command line: nothing is left of an earlier one in the same process."""
    _debug.set(debug)


Debug = Annotated[bool, typer.Option("--debug", callback=set_debug, help="show the traceback of an error")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line: code 2 for mistakes and unusable files, 130 for Ctrl-C, 1 for anything else."""
    try:
        yield
    except (typer.Exit, typer.Abort, SystemExit):  # argparse has said what is wrong, or printed its help
        raise
    except BaseException as error:
        if _debug.get():
            raise
        line, code = _describe(error)
        typer.echo(f"mcbn: {line}", err=True)
        raise typer.Exit(code) from error


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, MCBNError):
        return " ".join(str(error).split()), MISTAKE
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot use{where}: {error.strerror or error}", MISTAKE
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    return f"{type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", FAILURE


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
