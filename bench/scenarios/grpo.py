"""`specrollout bench grpo`: GRPO of the small policy, rolled out by stock vLLM, vLLM's own ngram and ours."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.bench.policy.grpo import GrpoConfig
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import FAMILIES, Problem

from vllm_specrollout.config import parse
from vllm_specrollout.errors import ConfigError

from ..grpo.fleet import Fleet, Request, Roller
from ..grpo.loop import Loop
from ..grpo.rows import epoch_rows, epochs_table, notes_text
from ..runner.engines import OURS, PROMPT_LEN, STOCK
from ..runner.models import check_length, find_model, shipped_drafters
from ..runner.report import Found, Table
from ..runner.scenario import EngineScenario, Session, command, flag

HEAD = "head"
ENGINES = (STOCK, "ngram", OURS, HEAD)
# vLLM's own drafters, by `speculative_config`; what is not named has vLLM's default
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 7, "prompt_lookup_min": 3}
_QUICK = {"problems": 2, "problems_per_step": 2, "samples": 2, "epochs": 2, "batch": 4, "max_tokens": 24}
"""Sizes under `--quick`."""
_UPDATE = GrpoConfig()


@dataclass(frozen=True, kw_only=True)
class Grpo(EngineScenario):
    """Train the small policy by GRPO, rolled out by stock vLLM and by others, their tokens compared."""

    bench: ClassVar[str] = "grpo"

    model: Path | None = flag(
        None, "The policy's folder; default: the one that comes with the project.", is_setting=False
    )
    size: str = flag(
        "150M",
        "Cost of the model the engines run: 30M, 150M, 400M, or `none` for the policy as it is.",
        is_setting=False,
    )
    engines: tuple[str, ...] = flag(
        (STOCK, OURS),
        "Which engines roll out: stock, ngram, ours, head (ours, with the policy's EAGLE-3 head).",
        choices=ENGINES,
    )
    spec_rollout: dict[str, Any] = flag({"drafters": ["history"]}, "Our engine's configuration, JSON or a file of it.")
    ngram: dict[str, Any] = flag(_NGRAM, "`speculative_config` of the ngram engine.")
    problems: int = flag(16, "Problems of the fixed set, from the training split.", within=(1, 10_000))
    problems_per_step: int = flag(8, "Problems between two updates; divides --problems.", within=(1, 10_000))
    samples: int = flag(8, "Answers to each problem.", within=(2, 1000))
    epochs: int = flag(6, "Passes over the problems.", within=(1, 10_000))
    family: str | None = flag(None, "arith or puzzle; default: both in turns.", choices=FAMILIES)
    batch: int = flag(16, "Requests at once (max_num_seqs).", within=(1, 256))
    max_tokens: int = flag(256, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    learning_rate: float = flag(_UPDATE.learning_rate, "Of AdamW.")
    clip: float = flag(_UPDATE.clip_low, "Ratios outside 1 +- this earn nothing more.")
    inner_epochs: int = flag(_UPDATE.inner_epochs, "Passes over a rollout's answers.")
    minibatches: int = flag(_UPDATE.minibatches, "Optimiser steps per pass.")
    threads: int = flag(1, "Torch threads of the trainer.", within=(1, 256))
    seed: int = flag(0, "Of the problems, their order and sampling.", within=(0, 1 << 30))
    quick: bool = flag(False, "A few short answers only, whatever the sizes say.", is_setting=False)
    trace: Path | None = flag(None, "Write every rollout's answers into this folder.", is_setting=False)
    save: Path | None = flag(None, "Write the trained policy into this folder.", is_setting=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.problems % self.problems_per_step:
            raise ConfigError(
                f"`--problems` is {self.problems}, no multiple of `--problems-per-step`, {self.problems_per_step}",
                "every step of every epoch needs as many problems: change one of the two",
            )

    def resolved(self) -> Grpo:
        return replace(self, **_QUICK) if self.quick else self  # type: ignore[arg-type]

    def check(self) -> None:
        super().check()
        _ = self.grpo, self.arms()
        for folder, name in ((self.trace, "--trace"), (self.save, "--save")):
            if folder is not None and folder.is_file():
                raise ConfigError(f"`{name}` is `{folder}`, which is a file", "name a folder")
        if self.trace is not None and any(self.trace.glob("rollout-*")):
            cause = f"`--trace` is `{self.trace}`, which holds another trace"
            raise ConfigError(cause, "name a new folder, or empty this one")

    @property
    def grpo(self) -> GrpoConfig:
        clips = {"clip_low": self.clip, "clip_high": self.clip}
        passes = {"inner_epochs": self.inner_epochs, "minibatches": self.minibatches}
        return GrpoConfig(learning_rate=self.learning_rate, seed=self.seed, **clips, **passes)  # type: ignore[arg-type]

    @property
    def steps_per_epoch(self) -> int:
        return self.problems // self.problems_per_step

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def settings(self) -> dict[str, Any]:
        names = ("name", "spec_rollout", "speculative_config")
        arms = [{name: getattr(arm, name) for name in names} for arm in self.arms()]
        return {**super().settings(), "grpo": asdict(self.grpo), "engines": arms}

    def arms(self) -> list[Roller]:
        """Stock first, then the others asked for."""
        if STOCK not in self.engines:
            cause = f"`--engines` is {','.join(self.engines)}, without stock"
            raise ConfigError(cause, "add `stock`: training goes on from its rollouts")
        if HEAD in self.engines and self.model is not None:
            cause = f"`--engines` names head, which is the project's own policy's, and `--model` is `{self.model}`"
            raise ConfigError(cause, "leave one of the two out")
        made = [
            Roller(name=STOCK),
            Roller(name="ngram", speculative_config=self.ngram),
            Roller(name=OURS, spec_rollout=self.spec_rollout),
            Roller(name=HEAD, spec_rollout=self.spec_rollout, has_head=True),
        ]
        arms = [arm for arm in made if arm.name in self.engines]
        for arm in arms:
            if arm.is_ours:
                parse(dict(arm.spec_rollout or {}), "--spec-rollout")
        return arms

    def problem_set(self) -> list[Problem]:
        """The problems of the loop, equal for equal scenarios."""
        return problems(self.problems, self.seed, self.family, split="train")

    def problems_of_step(self, chosen: Sequence[Problem], step: int) -> list[Problem]:
        """Which problems step `step` (from 0) rolls out: each epoch is a new order of the whole set, cut into steps."""
        epoch, part = divmod(step, self.steps_per_epoch)
        order = list(chosen)
        random.Random(f"order/{self.seed}/{epoch}").shuffle(order)
        return order[part * self.problems_per_step : (part + 1) * self.problems_per_step]

    def requests_of_step(
        self, chosen: Sequence[Problem], prompts: Mapping[str, Sequence[int]], step: int
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
                seed=zlib.crc32(f"{self.seed}/{step}/{problem.problem_id}/{sample}".encode()),
                prompt_ids=tuple(prompts[problem.problem_id]),
            )
            for problem in self.problems_of_step(chosen, step)
            for sample in range(self.samples)
        ]

    def measure(self, session: Session) -> Found:
        size = None if self.size == "none" else self.size
        arms = self.arms()
        policy, _ = find_model(self.model, None, self.dtype, self.cache, session.display, is_policy=True)
        served, title = find_model(self.model, size, self.dtype, self.cache, session.display, is_policy=True)
        if any(arm.has_head for arm in arms):
            head = {"speculative_config": shipped_drafters(served, size, self.cache)["head"]}
            arms = [replace(one, spec_rollout={**self.spec_rollout, **head}) if one.has_head else one for one in arms]
        # starts, rollouts, updates and pushes
        units = len(arms) + self.num_steps * (len(arms) + 2) - 1
        report = session.display.steps(units)
        shape = {"seqs": self.batch, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        check_length(served, shape["length"])
        with self.make_engines(served, report, kind=Fleet, arms=arms, plan=self, **shape) as fleet:
            steps, notes = Loop(self, policy, size, fleet).run()
        rows = epoch_rows(steps)
        return Found(model=title, rows=steps, extra={"epochs": rows, "notes": notes}, more=rows)

    def title(self, found: Found) -> str:
        sizes = f"{self.problems} problems x {self.samples} answers x {self.epochs} epochs, {self.batch} at once"
        return f"{found.model}{', as it is' if self.size == 'none' else ''}, {self.dtype}: {sizes}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield epochs_table(found.more)
        yield from notes_text(found.rows, found.extra["notes"])


bench_grpo = command(Grpo)
