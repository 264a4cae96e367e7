"""What is measured, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.models import DTYPES

SHAPES = ("tree", "chain", "both")
STOCK = "stock"
PROMPT_LEN = 256
"""Most tokens of a prompt; the tasks' prompts have 15 to 100."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pair of runs; stock goes first in even rounds, second in odd ones, so that drift favours nobody."""

    # -1 is the warm-up
    round: int
    batch: int
    arm: Arm
    # no more of this batch in this round
    is_last_of_batch: bool

    @property
    def is_stock_first(self) -> bool:
        return self.round % 2 == 0

    @property
    def is_timed(self) -> bool:
        return self.round >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one `specrollout bench engine`."""

    batches: tuple[int, ...] = (1, 4, 16)
    """Requests at once."""
    drafts: tuple[int, ...] = (3, 7, 15)
    """Draft tokens per request and step."""
    tokens: int = 96
    """Tokens generated per request."""
    accuracy: tuple[float, ...] = (1.0,)
    """Probability that the true token is the draft of rank 1, of rank 2, ..."""
    shape: str = "tree"
    """`tree`, `chain` (the first rank only), or `both`."""
    dtype: str = "bfloat16"
    repeats: int = 3
    """Timed rounds."""
    is_off_path: bool = False
    """Measure what the plugin costs when it drafts nothing, instead of drafts."""
    is_eager: bool = True
    seed: int = 0
    """Of the first request's noise; the others' follow."""

    def __post_init__(self) -> None:
        flags.in_range(self.tokens, "--tokens", 2, 1 << 16)
        flags.in_range(self.repeats, "--repeats", 1, 1000)
        flags.in_range(self.seed, "--seed", 0, 1 << 30)
        flags.choice(self.shape, "--shape", SHAPES)
        flags.choice(self.dtype, "--dtype", DTYPES)
        if self.shape == "both" and len(self.accuracy) == 1:
            raise ConfigError(
                "`--shape both` compares a chain with a tree, and one rank makes no tree",
                "give more ranks, for example `--accuracy 0.6,0.2`",
            )

    @classmethod
    def from_flags(cls, batch: str, draft: str, accuracy: str, **others: Any) -> Plan:
        """Parse the flags that hold lists.

        Raises:
            ConfigError: a flag that does not make sense.
        """
        return cls(
            batches=flags.integers(batch, "--batch", 1, 256),
            drafts=flags.integers(draft, "--draft", 1, MAX_NODES),
            accuracy=flags.probabilities(accuracy, "--accuracy"),
            **others,
        )

    def arms(self) -> list[Arm]:
        if self.is_off_path:
            return [
                Arm(name="installed, off", engine="installed", draft=0),
                Arm(name="on, no drafts", engine="idle", draft=0),
            ]
        shapes = ("chain", "tree") if self.shape == "both" else (self.shape,)
        # one rank is a chain, whatever shape is allowed
        titles = {"tree": "tree" if len(self.accuracy) > 1 else "chain", "chain": "chain"}
        return [Arm(name=titles[shape], engine=shape, draft=draft) for shape in shapes for draft in self.drafts]

    def spec_rollout(self, engine: str, oracle: Path) -> dict[str, Any] | None:
        """Our configuration of an engine named by an arm; None for one without drafts."""
        if engine in (STOCK, "installed"):
            return None
        if engine == "idle":
            return dict(_NEVER_DRAFTS)
        largest = max(self.drafts)
        ranks = self.accuracy if engine == "tree" else self.accuracy[:1]
        return {
            "drafters": ["oracle"],
            "budget": "fixed",
            "shape": engine,
            "max_draft_tokens": largest,
            "max_depth": largest,
            "oracle": {"path": str(oracle), "accuracy": list(ranks)},
        }

    def steps(self) -> Iterator[Step]:
        """Warm-up first, then the rounds; the two runs of a pair are neighbours."""
        arms = self.arms()
        for number in range(-1, self.repeats):
            for batch in self.batches:
                for arm in arms:
                    yield Step(round=number, batch=batch, arm=arm, is_last_of_batch=arm is arms[-1])

    def max_model_len(self) -> int:
        """Room for prompts, answers, and the step-time measurement's prefix."""
        return PROMPT_LEN + self.tokens + 2 * PROMPT_LEN

    def engine_arguments(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for stock and ours."""
        largest = max(self.batches)
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": self.is_eager,
            "max_num_seqs": largest,
            "max_model_len": self.max_model_len(),
            # all prompts, and all drafts, in one step; the step-time prefixes are longer than both
            "max_num_batched_tokens": max(2048, largest * 2 * PROMPT_LEN),
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def request_params(plan: Plan, batch: int, draft: int | None) -> list[dict[str, Any]]:
    """`SamplingParams` of each request: stock's (draft None), or ours."""
    params: list[dict[str, Any]] = []
    for i in range(batch):
        values: dict[str, Any] = {
            "temperature": 1.0,
            "seed": plan.seed + i,
            "max_tokens": plan.tokens,
            "ignore_eos": True,
        }
        if draft is not None:
            options: dict[str, Any] = {"problem_id": problem_id(batch, i)}
            if draft:
                options["max_draft_tokens"] = draft
            values["extra_args"] = {"spec_rollout": options}
        params.append(values)
    return params


def problem_id(batch: int, request: int) -> str:
    """The oracle's key. Per batch, since stock's rounding, and so its tokens, may differ from batch to batch."""
    return f"{batch}/{request}"
