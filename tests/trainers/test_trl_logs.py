"""TRL's logs with what drafts bring, in a trainer of transformers' own callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.trl import log_drafts

BEFORE = {"drafted": 10, "accepted": 9, "request_steps": 5, "output_tokens": 14, "decode_s": 1.0, "plain_s": 2.0}


class Engine:
    def __init__(self, is_ours: bool = True) -> None:
        self.stats, self._is_ours = dict(BEFORE), is_ours

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        if not self._is_ours:
            raise NotImplementedError(f"`{method}` is no method of the worker")
        return [dict(self.stats)]


class Written(TrainerCallback):
    """As a reporter: it keeps what it is given."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs = dict(logs)


class Trainer:
    def __init__(self, engine: Engine | None) -> None:
        self.vllm_generation = SimpleNamespace(llm=engine) if engine else None
        self.written = Written()
        self.callback_handler = CallbackHandler([self.written], None, None, None, None)
        self.state = TrainerState()

    def log(self) -> dict[str, float]:
        """As transformers' `Trainer.log`."""
        logs = {"loss": 1.0}
        self.state.log_history.append({**logs, "step": 3})
        self.callback_handler.on_log(SimpleNamespace(), self.state, TrainerControl(), logs)
        return self.written.logs


def test_reporters_and_the_trainers_own_record_get_what_came_since_the_last_log() -> None:
    engine = Engine()
    trainer = Trainer(engine)
    log_drafts(trainer)
    assert trainer.log() == {"loss": 1.0}, "there was no step"
    engine.stats = {name: value + BEFORE[name] * 2 for name, value in BEFORE.items()}
    engine.stats["accepted"] = 9 + 5
    told = {"spec_rollout/tokens_per_step": 2.8, "spec_rollout/accepted": 0.25, "spec_rollout/speedup": 2.0}
    assert trainer.log() == {"loss": 1.0, **told}
    assert trainer.state.log_history[-1] == {"loss": 1.0, "step": 3, **told}


def test_steps_without_drafts_have_no_share_of_them() -> None:
    engine = Engine()
    trainer = Trainer(engine)
    log_drafts(trainer)
    engine.stats["request_steps"], engine.stats["output_tokens"] = 15, 24
    assert trainer.log() == {"loss": 1.0, "spec_rollout/tokens_per_step": 1.0}


def test_a_trainer_whose_engine_is_stock_or_elsewhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is stock vLLM"):
        log_drafts(Trainer(Engine(is_ours=False)))
    with pytest.raises(ConfigError, match="no vLLM engine in its process"):
        log_drafts(Trainer(None))
