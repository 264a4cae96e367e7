"""Several engines on one host, each in a process of its own, that share a batch: see docs/concepts/ladder.md."""

from vllm_specrollout.cluster.group.dealing import Answer, GroupError
from vllm_specrollout.cluster.group.driver import RolloutGroup

__all__ = ["Answer", "GroupError", "RolloutGroup"]
