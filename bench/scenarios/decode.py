"""`specrollout bench engine`: decoding speed with drafts of known quality, against stock vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.errors import ConfigError

from ..runner.engines import PROMPT_LEN, STOCK, Engines, sampling, write_answers
from ..runner.fields import Row
from ..runner.models import find_model
from ..runner.oracle import ORACLE
from ..runner.report import Found, host
from ..runner.rows import Run, make_row, step_times
from ..runner.scenario import ModelScenario, Session, command, flag

SHAPES = ("tree", "chain", "both")
INSTALLED, IDLE, PAUSED = "installed", "idle", "paused"
# a context longer than any n-gram looked up here ever repeats: this drafter is asked every step and never drafts
_NEVER_DRAFTS = {"drafters": ["ngram"], "budget": "fixed", "ngram": {"min_match": 64, "max_match": 64}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One thing measured against stock: an engine, and how much it may draft."""

    name: str
    # which engine runs it
    engine: str
    # draft tokens per request and step; 0 where nothing is drafted
    draft: int

    def __str__(self) -> str:
        return f"{self.name} {self.draft or ''}".strip()


@dataclass(frozen=True, kw_only=True)
class Decode(ModelScenario):
    """Decode with drafts of known accuracy (the oracle drafter) and without: speed-up, ideal, efficiency."""

    bench: ClassVar[str] = "engine"

    batches: tuple[int, ...] = flag((1, 4, 16), "Requests at once.", "--batch", within=(1, 256))
    drafts: tuple[int, ...] = flag((3, 7, 15), "Draft tokens per request and step.", "--draft", within=(1, MAX_NODES))
    tokens: int = flag(96, "Tokens generated per request.", within=(2, 1 << 16))
    accuracy: tuple[float, ...] = flag(
        (1.0,),
        "Probability that the draft of rank 1, 2, ... is right; several ranks make trees.",
        parse=cli_flags.probabilities,
    )
    shape: str = flag("tree", "tree, chain (first rank only), or both.", choices=SHAPES)
    is_off_path: bool = flag(False, "Measure what the plugin costs while it drafts nothing.", "--off-path")
    is_eager: bool = flag(True, "Without or with torch.compile, in both.", "--eager/--compiled")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape == "both" and len(self.accuracy) == 1:
            raise ConfigError(
                "`--shape both` compares a chain with a tree, and one rank makes no tree",
                "give more ranks, for example `--accuracy 0.6,0.2`",
            )

    def arms(self) -> list[Arm]:
        if self.is_off_path:
            titles = {"installed, off": INSTALLED, "on, no drafts": IDLE, "on, paused": PAUSED}
            return [Arm(name=title, engine=engine, draft=0) for title, engine in titles.items()]
        shapes = ("chain", "tree") if self.shape == "both" else (self.shape,)
        # one rank is a chain, whatever shape is allowed
        is_tree = len(self.accuracy) > 1
        return [Arm(name=s if is_tree else "chain", engine=s, draft=draft) for s in shapes for draft in self.drafts]

    def spec_rollout(self, engine: str, oracle: Path) -> dict[str, Any] | None:
        """Our configuration of an engine named by an arm; None for one without drafts."""
        if engine in (STOCK, INSTALLED):
            return None
        if engine == IDLE:
            return dict(_NEVER_DRAFTS)
        if engine == PAUSED:
            return {"budget": "off"}
        largest = max(self.drafts)
        ranks = self.accuracy if engine == "tree" else self.accuracy[:1]
        return {
            "drafters": [{"name": ORACLE, "path": str(oracle), "accuracy": list(ranks)}],
            "budget": "fixed",
            "shape": engine,
            "max_draft_tokens": largest,
            "max_depth": largest,
        }

    def max_model_len(self) -> int:
        """Room for prompts, answers, and the step-time measurement's prefix."""
        return PROMPT_LEN + self.tokens + 2 * PROMPT_LEN

    def params(self, batch: int, draft: int | None) -> list[dict[str, Any]]:
        """`SamplingParams` of each request: without our options (draft None), or with them."""
        more = {"max_draft_tokens": draft} if draft else {}
        options = [None if draft is None else {"problem_id": problem_id(batch, i), **more} for i in range(batch)]
        return [sampling(self.seed + i, self.tokens, one, is_to_the_end=True) for i, one in enumerate(options)]

    def measure(self, session: Session) -> Found:
        folder, model = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=False)
        arms = self.arms()
        per_batch = 1 + len(arms) * (self.rounds + 1) + (0 if self.is_off_path else self.rounds)
        report = session.display.steps(len({arm.engine for arm in arms}) + 1 + len(self.batches) * per_batch)
        # all prompts, and all drafts, in one step; the step-time prefixes are longer than both
        shape = {"seqs": max(self.batches), "length": self.max_model_len(), "width": 2 * PROMPT_LEN}
        oracle = session.scratch / "oracle.json"
        with self.make_engines(folder, report, **shape, is_eager=self.is_eager) as engines:
            engines.start(STOCK)
            prompts = engines.prompts(max(self.batches))
            self._record(engines, prompts, oracle)
            for engine in dict.fromkeys(arm.engine for arm in arms):
                engines.start(engine, self.spec_rollout(engine, oracle), has_plugin=True)
            return Found(model=model, rows=self._rows(engines, prompts))

    def _rows(self, engines: Engines, prompts: list[list[int]]) -> list[Row]:
        """All batches under all arms, round by round."""
        arms, extend = self.arms(), {batch: dict[int, list[float]]() for batch in self.batches}

        def run(batch: int, arm: Arm | None, number: int) -> Run:
            is_stock = arm is None or arm.engine == INSTALLED
            params = self.params(batch, None if is_stock else arm.draft)
            return engines.run(STOCK if arm is None else arm.engine, prompts[:batch], params)

        def after(batch: int, number: int) -> None:
            if number >= 0 and not self.is_off_path:
                with engines.doing(f"stock's step times at batch {batch}"):
                    for n, milliseconds in self._extend(engines, prompts[:batch]).items():
                        extend[batch].setdefault(n, []).extend(milliseconds)

        cells, rows = dict.fromkeys(self.batches, arms), []
        pairs = engines.rounds(cells, range(-1, self.rounds), run, is_apart=True, after=after)
        for (batch, arm), own in pairs.items():
            decode_ms = [ms for pair in own if pair.is_timed for ms in pair.stock.step_ms()]
            times = step_times(decode_ms, extend[batch] or {1: [0.0]})
            rows.append(make_row(arm.name, batch, arm.draft, own, times))
        return rows

    def _record(self, engines: Engines, prompts: list[list[int]], oracle: Path) -> None:
        """Stock's answers at every batch, for the oracle."""
        recorded: dict[str, Sequence[int]] = {}
        for batch in self.batches:
            with engines.doing(f"recording batch {batch}"):
                run = engines.record(prompts[:batch], self.params(batch, None))
                recorded |= {problem_id(batch, i): ids for i, ids in enumerate(run.token_ids)}
        write_answers(oracle, recorded)

    def _extend(self, engines: Engines, prompts: list[list[int]]) -> dict[int, list[float]]:
        """One round of stock's step times at this batch, over prefixes about as long as the context half way."""
        block = engines[STOCK].ask("block_size")
        half_way = max(map(len, prompts)) + self.tokens // 2
        length = min(max(1, round(half_way / block)) * block, self.max_model_len() // block * block - block)
        length = max(block, length)
        # each begins elsewhere, so that no two share cached blocks
        begins = [i % len(prompt) for i, prompt in enumerate(prompts)]
        prefixes = [list(islice(cycle(prompt), at, at + length)) for at, prompt in zip(begins, prompts, strict=True)]
        return engines.extend_ms(prefixes, [1, *(1 + draft for draft in self.drafts)], seed=len(prompts))

    def title(self, found: Found) -> str:
        accuracy = ",".join(f"{share:g}" for share in self.accuracy)
        drafts = "no drafts" if self.is_off_path else f"oracle drafter, accuracy {accuracy}"
        return f"{found.model}, {self.dtype}, {self.tokens} tokens per request, {drafts}; {host()['cpu']}"


def problem_id(batch: int, request: int) -> str:
    """The oracle's key. Per batch, since stock's rounding, and so its tokens, may differ from batch to batch."""
    return f"{batch}/{request}"


bench_engine = command(Decode)
