"""What a policy does in stock vLLM: accuracy, answer lengths and repeat rates on held-out problems."""

import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .reward import problems, reward
from .tasks import FAMILIES, Problem, repeat_rate
from .tokenizer import MAX_LEN

_MAX_TOKENS = 1600
"""Tokens after which an answer counts as cut off."""
Group = tuple[Problem, Sequence[int], Sequence[Any]]
"""A problem, its prompt's tokens, and vLLM's answers: text without special tokens, token ids with the end token."""


def evaluate(model: Path, num_problems: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Samples in vLLM at temperature 1; figures per family and for `all`.

    Sample j of problem i is drawn with seed * 1_000_003 + i * samples + j.
    """
    from vllm import LLM, SamplingParams

    chosen = problems(num_problems, seed)
    engine = LLM(str(model), enforce_eager=True, max_model_len=MAX_LEN, max_num_seqs=256)
    chats = [[{"role": "user", "content": one.prompt}] for one in chosen for _ in range(samples)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS, seed=seed * 1_000_003 + i) for i in range(len(chats))
    ]
    results = iter(engine.chat(chats, params))
    by_problem = [(problem, list(islice(results, samples))) for problem in chosen]
    groups = [(one, own[0].prompt_token_ids or (), [r.outputs[0] for r in own]) for one, own in by_problem]
    by_family = {family: [group for group in groups if group[0].family == family] for family in FAMILIES}
    return {name: summarise(own) for name, own in {**by_family, "all": groups}.items()}


def summarise(groups: Sequence[Group]) -> dict[str, float]:
    """Shares and the repeat rate are in 0..1; tokens count the end token."""
    rewards = [[reward(problem, answer.text) for answer in own] for problem, _, own in groups]
    answers = [answer for _, _, own in groups for answer in own]
    lengths = sorted(len(answer.token_ids) for answer in answers)
    repeats = [repeat_rate([answer.token_ids for answer in own], prompt_ids) for _, prompt_ids, own in groups]
    return {
        "num_answers": len(answers),
        "accuracy": round(statistics.mean(value for row in rewards for value in row), 4),
        # problems some of whose samples are right and some wrong: those that RL learns from
        "mixed_share": round(statistics.mean(0.0 < statistics.mean(row) < 1.0 for row in rewards), 4),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "tokens_p50": lengths[len(lengths) // 2],
        "tokens_p90": lengths[len(lengths) * 9 // 10],
        "tokens_max": lengths[-1],
        "cut_share": round(1.0 - statistics.mean(answer.finish_reason == "stop" for answer in answers), 4),
        # with the other samples of one problem as history
        "repeat_rate": round(statistics.mean(repeats), 4),
    }
