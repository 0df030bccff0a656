"""What `mcbn report` runs."""

from mcbn_study.site.write import report

__all__ = ["report"]
