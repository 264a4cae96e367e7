"""TRL's logs with what drafts bring: `log_drafts(trainer)` before `trainer.train()`.

Whatever the trainer logs to then has, of the steps since the log before:

    spec_rollout/tokens_per_step   tokens that a request gets in a decode step; 1 without drafts
    spec_rollout/accepted          share of the verified draft tokens that were accepted
    spec_rollout/speedup           time of plain decode steps for as many tokens, by estimate, over the time taken
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from vllm_specrollout.errors import ConfigError

PREFIX = "spec_rollout/"
_COUNTS = ("drafted", "accepted", "request_steps", "output_tokens", "decode_s", "plain_s")


def log_drafts(trainer: Any) -> Any:
    """Have a trainer of TRL log what drafts bring in its engine (`vllm_mode="colocate"`), of the rank that logs.

    Raises:
        ConfigError: the trainer has no engine, or one without spec rollout.
    """
    generation = getattr(trainer, "vllm_generation", None)
    llm = getattr(generation, "llm", None)
    if llm is None:
        raise ConfigError(
            "the trainer has no vLLM engine in its process",
            'set use_vllm=True and vllm_mode="colocate"; of a server, /metrics tells as much',
        )
    callback = DraftsCallback(llm)
    # in front of those that write the logs down
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class DraftsCallback(TrainerCallback):
    """
    Args:
        llm: TRL's.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        try:
            stats = self._llm.collective_rpc("spec_rollout_stats")[0]
        except (AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"the trainer's engine is stock vLLM: {error}", "set VLLM_SPEC_ROLLOUT=1 before the trainer is made"
            ) from None
        return {name: stats[name] for name in _COUNTS}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        now = self._read()
        new = {name: now[name] - self._before[name] for name in _COUNTS}
        if logs is None or new["request_steps"] <= 0:
            return
        self._before = now
        found = {"tokens_per_step": new["output_tokens"] / new["request_steps"]}
        if new["drafted"]:
            found["accepted"] = new["accepted"] / new["drafted"]
        if new["decode_s"]:
            found["speedup"] = new["plain_s"] / new["decode_s"]
        told = {PREFIX + name: round(value, 4) for name, value in found.items()}
        logs.update(told)
        if state.log_history:
            state.log_history[-1].update(told)
