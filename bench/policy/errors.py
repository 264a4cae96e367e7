"""The one error class of this package: what was wrong, then the way out."""

from vllm_specrollout.errors import ConfigError


class PolicyError(ConfigError):
    """Bad input."""

    def __init__(self, cause: str, *, hint: str) -> None:
        super().__init__(cause, hint)
