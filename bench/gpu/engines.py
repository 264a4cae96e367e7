"""The engines of a part: started side by side, with equal random weights, and asked for its rows."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

from ..runner.engine_process import EngineProcess, EngineSpec
from ..runner.engines import write_answers
from ..runner.runs import Run
from . import models
from .plan import ARMS, RIVALS, STOCK, Cell, Scene, key_of, params, prompts, rival
from .runner import NotMeasured

LOGS = "logs"
"""Folder of the engines' logs below that of the work; the parent reads them, for an engine may end with its process."""
_LOG_LINES = 60
_WORTH_KNOWING = (
    "backend",
    "graph",
    "Model Runner",
    "model runner",
    "async",
    "FlashAttention",
    "compil",
    "WARNING",
    "ERROR",
)


class Engines:
    """Started engines by name; a context manager.

    Args:
        scene: what they have in common.
        names: `stock`, and arms of ours or rivals.
        work: folder for models and recordings; the same in every start, for caches may depend on it.
    """

    def __init__(self, scene: Scene, names: Sequence[str], work: Path, taus: Mapping[str, float] | None = None) -> None:
        self.scene = scene
        self.vocab = models.CONFIGS[scene.model].vocab_size
        self._taus = taus or {}
        self._folder = models.write(scene.model, work / "models" / scene.model)
        self._draft = models.write("0.5B" if scene.model == "7B" else "tiny", work / "models" / "draft", self.vocab)
        self._oracle = work / f"oracle-{scene.model}"
        self._logs = work / LOGS
        self._logs.mkdir(exist_ok=True)
        self._engines: dict[str, EngineProcess] = {}
        self._failed: dict[str, str] = {}
        self._primed: dict[str, tuple[Cell, str]] = {}
        self.start_s: dict[str, float] = {}
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            started = [(name, pool.submit(self._start, name)) for name in names]
        for name, future in started:
            error = future.exception()
            if error is None:
                self._engines[name], self.start_s[name] = future.result()
            elif isinstance(error, SpecRolloutError):
                self._failed[name] = str(error)
            else:
                self.close()
                raise error
        if STOCK in self._failed:
            self.close()
            raise RuntimeError(self._failed[STOCK])
        self._check_weights()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all at once: nothing of theirs is needed, and shutting down in order takes seconds each."""
        for engine in self._engines.values():
            engine.kill()
        self._engines.clear()

    def engine(self, name: str) -> EngineProcess:
        """
        Raises:
            NotMeasured: it did not start.
        """
        if name in self._failed:
            raise NotMeasured(f"the {name} engine is not there: {self._failed[name]}")
        return self._engines[name]

    def facts(self) -> dict[str, Any]:
        """Per engine: what it is made of, how long it took to start, and what its log says of that."""
        found: dict[str, Any] = {name: {"failed": error} for name, error in self._failed.items()}
        for name, engine in self._engines.items():
            lines = [line for line in engine.log().splitlines() if any(word in line for word in _WORTH_KNOWING)]
            told = [line[:240] for line in dict.fromkeys(lines)][:_LOG_LINES]
            found[name] = {**engine.ask("facts"), "start_s": round(self.start_s[name], 1), "log": told}
        return found

    def prime(self, name: str, cell: Cell, arm: str = "") -> list[list[int]]:
        """Have the cell's contexts in the engine's prefix cache; the prompts."""
        made = prompts(cell, self.vocab, arm)
        wanted = (cell, "ngram" if arm == "ngram" else "")
        if self._primed.get(name) != wanted:
            self.engine(name).ask("prime", prompts=made)
            self._primed[name] = wanted
        return made

    def generate(self, name: str, cell: Cell, arm: str = "", nodes: int | None = None) -> tuple[Run, dict[str, Any]]:
        """(the run, our worker's totals); the context comes from the prefix cache, so it is one step of one token."""
        reply = self.engine(name).ask(
            "generate",
            prompts=self.prime(name, cell, arm),
            params=params(self.scene, cell, arm, nodes),
            stats=nodes is not None,
            is_warm=True,
        )
        return Run.from_child(reply), reply.get("stats") or {}

    def teach(self, name: str, run: Run, accuracy: Sequence[float]) -> None:
        """Let our oracle draft this run's answers."""
        path = self._oracle.with_name(f"{self._oracle.name}-{name}.json")
        write_answers(path, {key_of(i): ids for i, ids in enumerate(run.token_ids)})
        self.engine(name).ask("rpc", method="spec_rollout_set_oracle", path=str(path), accuracy=list(accuracy))

    def _start(self, name: str) -> tuple[EngineProcess, float]:
        begin = time.monotonic()
        arguments, spec_rollout = self.scene.arguments(str(self._folder)), None
        if name in ARMS:
            path = self._oracle.with_name(f"{self._oracle.name}-{name}.json")
            write_answers(path, {})
            spec_rollout = self.scene.spec_rollout(name, str(path))
        elif name in RIVALS:
            if name == "suffix" and importlib.util.find_spec("arctic_inference") is None:
                raise SpecRolloutError("`suffix` needs arctic_inference, which is not installed", "install it")
            arguments["speculative_config"] = rival(name, self._taus[name], str(self._draft))
        engine = EngineProcess(
            EngineSpec(
                name=name,
                arguments=arguments,
                has_plugin=spec_rollout is not None,
                spec_rollout=spec_rollout,
                environment=self.scene.environment(),
                log=self._logs / f"{name}.log",
            )
        )
        return engine, time.monotonic() - begin

    def _check_weights(self) -> None:
        """Make the weights, equal in all.

        Raises:
            RuntimeError: they are not: nothing can be compared.
        """
        sums = {name: one.ask("randomise", logit_std=self.scene.logit_std) for name, one in self._engines.items()}
        if len(set(sums.values())) != 1:
            self.close()
            raise RuntimeError(f"the engines' random weights differ: checksums {sums}")


def as_if(stock: Run, ours: Run) -> Run:
    """`ours` with stock's tokens, for the figures of a run whose differences are told apart from them."""
    return replace(ours, token_ids=stock.token_ids)


def split(totals: Mapping[str, Any]) -> dict[str, float]:
    """The worker's totals per step: whatever it reports in milliseconds, and its counts."""
    steps = totals.get("steps") or 0
    if not steps:
        return {}
    names = [name for name, value in totals.items() if isinstance(value, (int, float)) and name != "steps"]
    return {"steps": steps, **{name: totals[name] / steps for name in names}}
