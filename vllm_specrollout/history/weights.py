"""How much an earlier answer counts when it is asked for the next tokens. Pure."""

from __future__ import annotations

from vllm_specrollout.config.drafters import HistoryConfig

ONE = 1 << 8
"""Weight 1.0, as the index takes it: weights are added up a great many times, so they are whole numbers."""
MOST = (1 << 31) - 1


def weight_of(config: HistoryConfig, age: int, reward: float | None) -> int:
    """decay^age * (1 + reward_weight * max(reward, 0)), in units of 1 / `ONE`.

    RhymeRL (5.3) follows the branch with the largest sum of rewards. Here an answer without reward counts as well,
    since rewards may be zero throughout or come late, and older answers count less, since the policy has moved on (DAS
    finds answers alike mostly between epochs that are near). With `reward_priority` it is as in RhymeRL: decay^age *
    max(reward, 0), where answers without any such reward still weigh enough to decide among themselves.

    Args:
        age: epochs since the answer's own; below 0 (an epoch begun anew) counts as 0.
        reward: as reported; None: not reported, counts as 0.

    Returns:
        From 1 to `MOST`: whatever is kept counts a little, unless decay is 0 and the answer old: then 0.
    """
    fresh = config.decay ** max(age, 0)
    if fresh == 0.0:
        return 0
    gain = max(reward or 0.0, 0.0)
    weight = fresh * (gain if config.reward_priority else 1.0 + config.reward_weight * gain)
    return int(min(max(round(weight * ONE), 1), MOST)) if weight < MOST else MOST
