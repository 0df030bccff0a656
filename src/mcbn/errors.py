"""The one exception type for every mistake a user can make, and others said in one line."""


class MCBNError(ValueError):
    """Something the caller can mend: the message says what was wrong, what came, and what to do."""


def one_line(error: BaseException) -> str:
    """Say an error in one line, and its kind where it is not ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MCBNError) else f"{type(error).__name__}: {text}".removesuffix(": ")
