"""The one exception type for every mistake a user can make."""


class MCBNError(ValueError):
    """Something the caller can mend: the message says what was wrong, what came, and what to do."""
