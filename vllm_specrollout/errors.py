"""Errors a user can meet. Every message reads: cause, value, limit; then a blank line and `hint:` with the way out."""

from __future__ import annotations

import logging
import reprlib
from typing import Any

logger = logging.getLogger("vllm.specrollout")
"""Of the whole package: vLLM's own handlers and levels hold for it."""
MAX_SHOWN = 80
"""Characters of a wrong value that its error repeats, at most."""
MAX_PATH_SHOWN = 300
"""Of a path."""


class SpecRolloutError(ValueError):
    """A mistake in what the user asked for.

    It is a `ValueError` on purpose: that is what callers of vLLM expect for arguments it cannot use.
    """

    def __init__(self, cause: str, hint: str) -> None:
        self.cause = cause
        self.hint = hint
        super().__init__(f"{cause}\n\nhint: {hint}")

    def __reduce__(self) -> tuple[type[SpecRolloutError], tuple[str, str]]:
        """As it crosses between processes."""
        return type(self), (self.cause, self.hint)


class ConfigError(SpecRolloutError):
    """The configuration, or a request's options, cannot be used."""


class UnsupportedError(SpecRolloutError):
    """The configuration is fine, but this vLLM, platform or model cannot run it."""


class ForbiddenError(ConfigError):
    """Whoever owns the server has not allowed it."""


class _Short(reprlib.Repr):
    """Never longer than an error may be, and never an error itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxlevel = 3
        self.maxother = MAX_SHOWN

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: MAX_SHOWN + 1])

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write down more than some thousand digits
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


def shown(value: Any, most: int = MAX_SHOWN) -> str:
    """A wrong value as its error repeats it: as Python writes it, on one line, at most so many characters of it."""
    text = repr(value[: most + 1]) if isinstance(value, str) else _SHORT.repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def shown_path(path: str) -> str:
    """A path, likewise: its end says more than its beginning."""
    return shown(path, MAX_PATH_SHOWN)


def named(key: Any) -> str:
    """A key as its error names it, likewise: without quotes around it."""
    return shown(key).strip("'") if isinstance(key, str) else shown(key)


_SHORT = _Short()
