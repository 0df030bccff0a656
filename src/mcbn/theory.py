"""What the paper derives about batch statistics: found here where mcbn-study, which holds it, is installed."""

from mcbn.plugins import moved_names

__getattr__ = moved_names(__name__)
