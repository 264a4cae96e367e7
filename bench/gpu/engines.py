"""The engines of a part: started side by side, with equal random weights, and asked for its rows."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

from ..runner.engine_process import EngineProcess, EngineSpec
from ..runner.engines import write_answers
from ..runner.runs import Run
from ..runner.ties import JUDGE
from .child import NotMeasured
from .plan import ARMS, MODELS, RIVALS, STOCK, Cell, Scene, params, problem_id, prompts, rival, write_model

LOGS = "logs"
"""Folder of the engines' logs below that of the work; the parent reads them, for an engine may end with its process."""
_LOG_LINES = 60
_WORTH_KNOWING = (
    *("backend", "graph", "Model Runner", "model runner", "async", "FlashAttention", "compil"),
    *("WARNING", "ERROR"),
)


class Engines:
    """Started engines by name, until they are closed.

    Args:
        scene: what they have in common.
        names: `stock`, and arms of ours or rivals.
        work: folder for models and recordings; the same in every start, for caches may depend on it.
        taus: tokens a step of the rivals.
    """

    def __init__(self, scene: Scene, names: Sequence[str], work: Path, taus: Mapping[str, float]) -> None:
        self.scene, self._taus, self._work = scene, taus, work
        self.vocab = MODELS[scene.model].vocab
        self._folder = write_model(scene.model, work / "models" / scene.model)
        self._draft = write_model("0.5B" if scene.model == "7B" else "tiny", work / "models" / "draft", self.vocab)
        (work / LOGS).mkdir(exist_ok=True)
        self._engines: dict[str, EngineProcess] = {}
        self._failed: dict[str, str] = {}
        self._primed: dict[str, tuple[Cell, bool]] = {}
        self._start_s: dict[str, float] = {}
        try:
            with ThreadPoolExecutor(max_workers=len(names)) as pool:
                list(pool.map(self._start, names))
            self._engines = {name: self._engines[name] for name in names if name in self._engines}
            if STOCK in self._failed:
                raise RuntimeError(self._failed[STOCK])
            sums = {name: one.ask("randomise", logit_std=scene.logit_std) for name, one in self._engines.items()}
            # or nothing can be compared
            if len(set(sums.values())) != 1:
                raise RuntimeError(f"the engines' random weights differ: checksums {sums}")
        except BaseException:
            self.close()
            raise

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
            found[name] = {
                **engine.ask("call", function="facts"),
                "start_s": round(self._start_s[name], 1),
                "log": told,
            }
        return found

    def prime(self, name: str, cell: Cell, arm: str = "") -> list[list[int]]:
        """Have the cell's contexts in the engine's prefix cache; the prompts."""
        made = prompts(cell, self.vocab, arm)
        wanted = (cell, arm == "ngram")
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
        path = write_answers(self._oracle(name), {problem_id(i): ids for i, ids in enumerate(run.token_ids)})
        self.engine(name).ask("rpc", method="spec_rollout_set_oracle", path=str(path), accuracy=list(accuracy))

    def _oracle(self, name: str) -> Path:
        return self._work / f"oracle-{self.scene.model}-{name}.json"

    def _start(self, name: str) -> None:
        begin = time.monotonic()
        arguments, spec_rollout = self.scene.arguments(str(self._folder)), None
        if name == STOCK:
            arguments |= JUDGE
        try:
            if name in ARMS:
                spec_rollout = self.scene.spec_rollout(name, str(write_answers(self._oracle(name), {})))
            elif name in RIVALS:
                if name == "suffix" and importlib.util.find_spec("arctic_inference") is None:
                    raise SpecRolloutError("`suffix` needs arctic_inference, which is not installed", "install it")
                arguments["speculative_config"] = rival(name, self._taus[name], str(self._draft))
            self._engines[name] = EngineProcess(
                EngineSpec(
                    name=name,
                    arguments=arguments,
                    has_plugin=spec_rollout is not None,
                    spec_rollout=spec_rollout,
                    environment=self.scene.environment(),
                    log=self._work / LOGS / f"{name}.log",
                )
            )
        except SpecRolloutError as error:
            self._failed[name] = str(error)
        self._start_s[name] = time.monotonic() - begin
