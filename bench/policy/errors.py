"""The one error class of this package: what was wrong, then the way out."""


class PolicyError(ValueError):
    """Bad input. Its text is `cause, value, limit`, a blank line, and `hint: way out`."""

    def __init__(self, cause: str, *, hint: str) -> None:
        super().__init__(f"{cause}\n\nhint: {hint}")
