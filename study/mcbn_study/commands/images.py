"""Where an installation before this one looks for `mcbn reproduce`."""

from mcbn_study.commands.reproduce import reproduce as reproduce
