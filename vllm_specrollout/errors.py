"""Errors a user can meet. Every message reads: cause, value, limit; then a blank line and `hint:` with the way out."""

from __future__ import annotations


class SpecRolloutError(ValueError):
    """A mistake in what the user asked for.

    It is a `ValueError` on purpose: that is what callers of vLLM expect for arguments it cannot use.
    """

    def __init__(self, cause: str, hint: str) -> None:
        self.cause = cause
        self.hint = hint
        super().__init__(f"{cause}\n\nhint: {hint}")


class ConfigError(SpecRolloutError):
    """The configuration, or a request's options, cannot be used."""


class UnsupportedError(SpecRolloutError):
    """The configuration is fine, but this vLLM, platform or model cannot run it."""
