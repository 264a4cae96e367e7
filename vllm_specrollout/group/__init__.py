"""Several engines on one host, each in a process of its own, that share a batch: see docs/concepts/ladder.md."""

from vllm_specrollout.group.dealing import Answer, GroupError
from vllm_specrollout.group.driver import RolloutGroup

__all__ = ["Answer", "GroupError", "RolloutGroup"]
