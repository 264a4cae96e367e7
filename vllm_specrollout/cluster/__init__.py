"""Groups of engines, and drafters in processes of their own: who runs what, messages, mailboxes, planning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_specrollout.cluster.ray.group import GroupAnswer, GroupError, SpecGroup
    from vllm_specrollout.cluster.ray.trainer import lend

__all__ = ["GroupAnswer", "GroupError", "SpecGroup", "lend"]


def __getattr__(name: str) -> Any:
    """A group is looked for when it is asked for: it needs Ray, and nothing else here does."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_specrollout.errors import UnsupportedError

    try:
        from vllm_specrollout.cluster.ray import group, trainer
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UnsupportedError(
            "a group of engines needs Ray, and it is not installed", "pip install 'vllm-specrollout[cluster]'"
        ) from None
    return getattr(trainer if name == "lend" else group, name)
