"""Every table and figure of Teye et al. 2018: where the paper has it, and where it stands in the reproduction."""

from typing import NamedTuple

from mcbn_study.tables import read_words


class Item(NamedTuple):
    """One table or figure.

    Attributes:
        where: as the paper numbers it.
        what: what it shows.
        study: the study that makes it; empty for what has none yet.
        page: of the site; empty where there is none.
        anchor: on that page; for tables the label of the paper.
        printed: what the paper's own looks like, in words, for figures and for what was not run.
    """

    where: str
    what: str
    study: str = ""
    page: str = ""
    anchor: str = ""
    printed: str = ""


_WORDS = read_words(__package__)
ITEMS = tuple(Item(**item) for item in _WORDS["items"])
FURTHER = "Not in the paper"  # where the others are
STUDIES = ("regression", "sensitivity", "statistics", "objective", "regularizer")  # each with a page of its own making
FOLDERS: dict[str, str] = _WORDS["folders"]
THEORY: dict[str, str] = _WORDS["theory"]
SPEED: dict[str, str] = _WORDS["speed"]
PAGES: dict[str, str] = _WORDS["pages"]
COMMANDS = {study: f"mcbn reproduce {study}" for study in ("toy", *STUDIES, *FOLDERS)} | _WORDS["commands"]
