"""What a policy does in stock vLLM: accuracy, answer lengths and repeat rates on held-out problems."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import ConfigError

from .reward import problems, reward
from .tasks import FAMILIES, Problem, repeat_rate
from .tokenizer import MAX_LEN


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One evaluation; equal values give equal problems and equal sampling seeds."""

    # Held-out problems, half of each family, and answers to each.
    num_problems: int = 240
    samples: int = 4
    # Seed of the problem set; sample j of problem i is drawn with seed * 1_000_003 + i * samples + j.
    seed: int = 0
    temperature: float = 1.0
    # Tokens after which an answer counts as cut off.
    max_tokens: int = 1600

    def __post_init__(self) -> None:
        if self.num_problems < len(FAMILIES) or self.samples < 2:
            cause = f"{self.num_problems} problems x {self.samples} samples are too few, the least is 2 x 2"
            raise ConfigError(cause, "give larger --problems and --samples")


@dataclass(frozen=True, kw_only=True)
class FamilyStats:
    """Figures of one family of problems, or of all."""

    num_answers: int
    # Share of answers with reward 1, in 0..1.
    accuracy: float
    # Share of problems some of whose samples are right and some wrong: those that RL learns from.
    mixed_share: float
    # Answer tokens, the end token included.
    tokens_mean: float
    tokens_p50: int
    tokens_p90: int
    tokens_max: int
    # Share of answers cut off at max_tokens.
    cut_share: float
    # Mean of `tasks.repeat_rate` over problems, in 0..1, with the other samples of one problem as history.
    repeat_rate: float


Group = tuple[Problem, Sequence[int], Sequence[Any]]
"""A problem, its prompt's tokens, and vLLM's answers: text without special tokens, token ids with the end token."""


def evaluate(model: Path, config: EvalConfig) -> dict[str, FamilyStats]:
    """Samples in vLLM and returns figures per family and for `all`."""
    groups = sample(model, config)
    by_family = {family: [group for group in groups if group[0].family == family] for family in FAMILIES}
    return {name: summarise(chosen) for name, chosen in {**by_family, "all": groups}.items()}


def sample(model: Path, config: EvalConfig) -> list[Group]:
    """The answers that stock vLLM gives, one group per problem, each sample with its own seed."""
    from vllm import LLM, SamplingParams

    chosen = problems(config.num_problems, config.seed)
    engine = LLM(str(model), enforce_eager=True, max_model_len=MAX_LEN, max_num_seqs=256)
    chats = [[{"role": "user", "content": one.prompt}] for one in chosen for _ in range(config.samples)]
    limits = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    params = [SamplingParams(**limits, seed=config.seed * 1_000_003 + i) for i in range(len(chats))]
    results = iter(engine.chat(chats, params))
    by_problem = [(problem, list(islice(results, config.samples))) for problem in chosen]
    return [(one, own[0].prompt_token_ids or (), [r.outputs[0] for r in own]) for one, own in by_problem]


def summarise(groups: Sequence[Group]) -> FamilyStats:
    """Figures over some groups."""
    rewards = [[reward(problem, answer.text) for answer in own] for problem, _, own in groups]
    flat = [value for row in rewards for value in row]
    answers = [answer for _, _, own in groups for answer in own]
    lengths = sorted(len(answer.token_ids) for answer in answers)
    repeats = [repeat_rate([answer.token_ids for answer in own], prompt_ids) for _, prompt_ids, own in groups]
    return FamilyStats(
        num_answers=len(flat),
        accuracy=round(statistics.mean(flat), 4),
        mixed_share=round(statistics.mean(0.0 < statistics.mean(row) < 1.0 for row in rewards), 4),
        tokens_mean=round(statistics.mean(lengths), 1),
        tokens_p50=lengths[len(lengths) // 2],
        tokens_p90=lengths[len(lengths) * 9 // 10],
        tokens_max=lengths[-1],
        cut_share=round(1.0 - statistics.mean(answer.finish_reason == "stop" for answer in answers), 4),
        repeat_rate=round(statistics.mean(repeats), 4),
    )


def as_json(config: EvalConfig, stats: dict[str, FamilyStats]) -> dict:
    """The evaluation as it stands in `training.json`."""
    import vllm

    return {"vllm": vllm.__version__, "config": asdict(config), **{name: asdict(s) for name, s in stats.items()}}
