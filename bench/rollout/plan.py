"""What a rollout benchmark runs: problems, samples, seeds, engines. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.config import BUDGETS, MAX_NODES, SpecRolloutConfig

from ..common import flags
from ..common.models import DTYPES
from ..policy.tasks import Problem

# the oracle needs recorded answers; and rounds repeat each other, so a history would know them all but the first
DRAFTERS = ("ngram",)
PROMPT_LEN = 256
"""Most tokens of a prompt; the tasks' prompts have 15 to 100."""
_DEFAULT = SpecRolloutConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one `specrollout bench rollout`."""

    prompts: int = 16
    """Problems, half of each family, from the held-out set."""
    samples: int = 4
    """Answers to each problem."""
    batch: int = 8
    """Requests at once (`max_num_seqs`)."""
    max_tokens: int = 1024
    """Tokens after which an answer is cut off."""
    rounds: int = 3
    """Timed rounds."""
    seed: int = 0
    """Of the problem set and of sampling."""
    drafters: tuple[str, ...] = DRAFTERS
    max_draft_tokens: int = _DEFAULT.max_draft_tokens
    budget: str = _DEFAULT.budget
    dtype: str = "bfloat16"
    explain: int = 0
    """Slowest requests whose decisions are written down and told; 0 writes nothing down."""

    def __post_init__(self) -> None:
        flags.in_range(self.prompts, "--prompts", 1, 10_000)
        flags.in_range(self.samples, "--samples", 1, 1000)
        flags.in_range(self.batch, "--batch", 1, 256)
        flags.in_range(self.max_tokens, "--max-tokens", 2, 1 << 16)
        flags.in_range(self.rounds, "--rounds", 1, 1000)
        flags.in_range(self.max_draft_tokens, "--max-draft-tokens", 1, MAX_NODES)
        flags.in_range(self.explain, "--explain-requests", 0, 1000)
        flags.choice(self.budget, "--budget", BUDGETS)
        flags.choice(self.dtype, "--dtype", DTYPES)

    @property
    def num_requests(self) -> int:
        return self.prompts * self.samples

    def spec_rollout(self) -> dict[str, Any]:
        """Our engine's configuration."""
        return {
            "drafters": list(self.drafters),
            "max_draft_tokens": self.max_draft_tokens,
            "budget": self.budget,
            # rounds repeat each other here too: every length would be known
            "queue_order": "arrival",
        }

    def max_model_len(self) -> int:
        return PROMPT_LEN + self.max_tokens

    def engine_arguments(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for stock and ours."""
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "max_num_seqs": self.batch,
            "max_model_len": self.max_model_len(),
            # no prompt is ever prefilled in two pieces: with seeds, stock vLLM on CPU stops with an error there
            "max_num_batched_tokens": max(2048, self.batch * 2 * PROMPT_LEN),
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def request_params(plan: Plan, problems: list[Problem], *, is_ours: bool) -> list[dict[str, Any]]:
    """`SamplingParams` of each request: all samples of the first problem, then of the second, ..."""
    params: list[dict[str, Any]] = []
    for i, problem in enumerate(problems):
        for j in range(plan.samples):
            # the numbering of bench/policy/evaluate.py, so that both sample the same answers
            seed = plan.seed * 1_000_003 + i * plan.samples + j
            values: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": plan.max_tokens}
            if is_ours:
                values["extra_args"] = {"spec_rollout": {"problem_id": problem.problem_id}}
            params.append(values)
    return params
