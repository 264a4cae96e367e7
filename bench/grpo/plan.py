"""What an RL loop runs: problems, samples, seeds, epochs, engines. Pure."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_specrollout.config import parse
from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.engine_process import EngineSpec
from ..common.models import DTYPES
from ..policy.grpo import GrpoConfig
from ..policy.reward import problems
from ..policy.tasks import FAMILIES, Problem

PROMPT_LEN = 256
"""Most tokens of a prompt; the tasks' prompts have 15 to 100."""
ENGINES = ("stock", "ngram", "suffix", "ours")
STOCK, OURS = "stock", "ours"
DEFAULT_SPEC_ROLLOUT: Mapping[str, Any] = {"drafters": ["history"]}
# vLLM's own drafters, by `speculative_config`; what is not named has vLLM's default
DEFAULT_SPECULATIVE: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 7, "prompt_lookup_min": 3},
    "suffix": {"method": "suffix"},
}
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "no rewards": {"history": {"reward_weight": 0.0}},
    "no siblings": {"history": {"siblings": False}},
    "one epoch": {"history": {"epochs": 1}},
    "global index": {"history": {"scope": "global"}},
}
"""Variants of ours: name -> what is laid over its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine of the loop."""

    name: str
    # `spec_rollout=` of our engine, None for vLLM's own
    spec_rollout: Mapping[str, Any] | None = None
    # `speculative_config=` of vLLM's own speculation
    speculative: Mapping[str, Any] | None = None
    # folders put before all others on the import path
    import_path: str = ""

    @property
    def is_ours(self) -> bool:
        return self.spec_rollout is not None

    def engine_spec(self, arguments: Mapping[str, Any], *, kv_gib: int, is_verbose: bool) -> EngineSpec:
        """The process that serves this arm; every arm gets the same arguments but for its drafts."""
        given = dict(arguments)
        if self.speculative is not None:
            given["speculative_config"] = dict(self.speculative)
        return EngineSpec(
            name=self.name,
            arguments=given,
            kv_gib=kv_gib,
            has_plugin=self.is_ours,
            spec_rollout=dict(self.spec_rollout) if self.spec_rollout is not None else None,
            is_verbose=is_verbose,
            environment={"PYTHONPATH": self.import_path} if self.import_path else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one RL loop."""

    problems: int = 16
    """Problems of the fixed set, from the training split."""
    problems_per_step: int = 8
    """Problems rolled out between two updates; divides `problems`."""
    samples: int = 8
    """Answers to each problem: the group."""
    epochs: int = 6
    """Passes over the problem set."""
    family: str | None = None
    """`arith` or `puzzle`; None: they take turns."""
    batch: int = 16
    """Requests at once (`max_num_seqs`)."""
    max_tokens: int = 256
    """Tokens after which an answer is cut off."""
    seed: int = 0
    """Of the problem set, of their order and of sampling."""
    dtype: str = "bfloat16"
    """Of the engines' weights; training is in float32."""
    threads: int = 1
    """Torch threads of the trainer."""
    grpo: GrpoConfig = field(default_factory=GrpoConfig)

    def __post_init__(self) -> None:
        flags.in_range(self.problems, "--problems", 1, 10_000)
        flags.in_range(self.problems_per_step, "--problems-per-step", 1, self.problems)
        if self.problems % self.problems_per_step:
            raise ConfigError(
                f"`--problems` is {self.problems}, no multiple of `--problems-per-step`, {self.problems_per_step}",
                "every step of every epoch needs as many problems: change one of the two",
            )
        flags.in_range(self.samples, "--samples", 2, 1000)
        flags.in_range(self.epochs, "--epochs", 1, 10_000)
        flags.in_range(self.batch, "--batch", 1, 256)
        flags.in_range(self.max_tokens, "--max-tokens", 2, 1 << 16)
        flags.in_range(self.threads, "--threads", 1, 256)
        flags.choice(self.dtype, "--dtype", DTYPES)
        if self.family is not None:
            flags.choice(self.family, "--family", FAMILIES)

    @property
    def steps_per_epoch(self) -> int:
        return self.problems // self.problems_per_step

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def max_model_len(self) -> int:
        return PROMPT_LEN + self.max_tokens

    def engine_arguments(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for all engines."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to ask for; the same for every engine."""

    request_id: str
    problem: Problem
    sample: int
    seed: int
    prompt_ids: tuple[int, ...]

    def params(self, plan: Plan, *, is_ours: bool) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`. Only our engine is told which problem it is."""
        values: dict[str, Any] = {"temperature": 1.0, "seed": self.seed, "max_tokens": plan.max_tokens}
        if is_ours:
            values["extra_args"] = {"spec_rollout": {"problem_id": self.problem.problem_id}}
        return values


def problem_set(plan: Plan) -> list[Problem]:
    """The problems of the loop, equal for equal plans."""
    return problems(plan.problems, plan.seed, plan.family, split="train")


def problems_of_step(plan: Plan, chosen: Sequence[Problem], step: int) -> list[Problem]:
    """Which problems step `step` (from 0) rolls out: each epoch is a new order of the whole set, cut into steps."""
    epoch, part = divmod(step, plan.steps_per_epoch)
    order = list(chosen)
    random.Random(f"order/{plan.seed}/{epoch}").shuffle(order)
    return order[part * plan.problems_per_step : (part + 1) * plan.problems_per_step]


def requests_of_step(
    plan: Plan, chosen: Sequence[Problem], prompts: Mapping[str, Sequence[int]], step: int
) -> list[Request]:
    """All samples of the step's first problem, then of the second, ...

    Args:
        prompts: problem id -> prompt tokens.
    """
    return [
        Request(
            # no name comes twice in a run: engines that keep answers by name must not take one for another
            request_id=f"{step}/{problem.problem_id}/{sample}",
            problem=problem,
            sample=sample,
            seed=zlib.crc32(f"{plan.seed}/{step}/{problem.problem_id}/{sample}".encode()),
            prompt_ids=tuple(prompts[problem.problem_id]),
        )
        for problem in problems_of_step(plan, chosen, step)
        for sample in range(plan.samples)
    ]


def make_arms(
    engines: Sequence[str],
    spec_rollout: Mapping[str, Any],
    speculative: Mapping[str, Mapping[str, Any]],
    suffix_path: str,
    *,
    is_ablation: bool,
) -> list[Arm]:
    """Stock first, then the others asked for; with `is_ablation`, the variants of ours after it.

    Raises:
        ConfigError: `stock` is left out, or our configuration is wrong.
    """
    if STOCK not in engines:
        raise ConfigError(
            f"`--engines` is {','.join(engines)}, without stock", "add `stock`: training goes on from its rollouts"
        )
    arms = [Arm(name=STOCK)]
    for name in ("ngram", "suffix"):
        if name in engines:
            arms.append(
                Arm(name=name, speculative=speculative[name], import_path=suffix_path if name == "suffix" else "")
            )
    if OURS in engines or is_ablation:
        arms.append(Arm(name=OURS, spec_rollout=spec_rollout))
    if is_ablation:
        if "history" not in spec_rollout.get("drafters", ()):
            raise ConfigError(
                f"`--ablate` varies the history drafter, and `--spec-rollout` names {spec_rollout.get('drafters')}",
                'add "history" to its drafters',
            )
        arms += [Arm(name=name, spec_rollout=overlaid(spec_rollout, over)) for name, over in ABLATIONS.items()]
    for arm in arms:
        if arm.is_ours:
            parse(dict(arm.spec_rollout or {}), "--spec-rollout")
    return arms


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, object by object."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object in a flag, or in the file it names.

    Raises:
        ConfigError: it is none.
    """
    way = f"give a JSON object in single quotes, for example `{flag} '{json.dumps(DEFAULT_SPEC_ROLLOUT)}'`"
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"`{flag}` is neither a JSON object nor a file with one: {error}", way) from None
    if not isinstance(value, dict):
        raise ConfigError(f"`{flag}` is {value!r}, no object", way)
    return value
