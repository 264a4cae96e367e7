"""Lossless tree speculation for RL rollouts inside vLLM.

Importing this package makes `LLM(MODEL, spec_rollout=True)` work, before or after vLLM is imported. Trainers tell a
running engine of rewards and epochs with `report_rewards` and `begin_epoch`, and give its head other weights with
`load_drafter`. For an `AsyncLLM`, await the functions of the same names with an `a` before them. `learn` has the head
of an `LLM` learn between two rollouts; that of an `AsyncLLM` does so by itself. `resumed` makes the request that goes
on with an answer that was interrupted.
"""

from vllm_specrollout.config.resuming import resumed
from vllm_specrollout.plugin import register
from vllm_specrollout.server.learning import learn
from vllm_specrollout.server.reports import (
    abegin_epoch,
    aload_drafter,
    aread_drafters,
    aread_history,
    areport_rewards,
    begin_epoch,
    load_drafter,
    read_drafters,
    read_history,
    report_rewards,
)

__all__ = [
    "abegin_epoch",
    "aload_drafter",
    "aread_drafters",
    "aread_history",
    "areport_rewards",
    "begin_epoch",
    "learn",
    "load_drafter",
    "read_drafters",
    "read_history",
    "register",
    "report_rewards",
    "resumed",
]

__version__ = "0.1.0"

register()
