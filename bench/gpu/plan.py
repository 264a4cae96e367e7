"""Which engines run which cells, and what that is expected to take. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .models import CONFIGS

BLOCK = 64
"""Contexts are multiples of it, so that the prefix cache holds them whole in any engine's blocks."""
DRAFTS = {2.0: 3, 4.0: 7, 6.5: 15}
"""Tokens a step to reach -> draft tokens given to reach it."""
RIVALS = ("ngram", "suffix", "draft_model")
_STEP_SLACK = 4  # a request may be given drafts beyond its last token
_BANDWIDTH, _PREFILL_FLOPS = 4e12, 3e14  # for the estimates of a dry run only
_START_S = {"7B": 75.0, "0.5B": 45.0, "tiny": 10.0}


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests at once, each with `context` tokens cached before the clock starts."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The engine part for one model."""

    model: str
    cells: tuple[Cell, ...]
    # tokens a step to reach with drafts
    taus: tuple[float, ...]
    rivals: tuple[str, ...]
    # tokens generated per request
    tokens: int
    # timed rounds
    repeats: int
    budget: str = "fixed"

    @property
    def max_model_len(self) -> int:
        return max(cell.context for cell in self.cells) + BLOCK + self.tokens + max(DRAFTS.values()) + _STEP_SLACK

    @property
    def kv_bytes(self) -> int:
        """KV cache that holds the largest cell to its end, with a block to spare per request."""
        most = max(cell.batch * (cell.context + self.tokens + 2 * BLOCK) for cell in self.cells)
        return max(most, 2 * self.max_model_len) * CONFIGS[self.model].kv_token_bytes

    def arguments(self, folder: str) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for every engine."""
        return {
            "model": folder,
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_num_seqs": max(cell.batch for cell in self.cells),
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self.kv_bytes,
            # several engines share the device; the KV cache is set above, so this only has to be free
            "gpu_memory_utilization": 0.1,
        }

    def spec_rollout(self, oracle: str) -> dict[str, Any]:
        """Our engine's configuration; requests choose their own number of drafts."""
        largest = max(DRAFTS[tau] for tau in self.taus)
        return {
            "drafters": ["oracle"],
            "budget": self.budget,
            "shape": "chain",
            "max_draft_tokens": largest,
            "max_depth": largest,
            "oracle": {"path": oracle, "accuracy": [1.0]},
        }

    def seconds(self, cell: Cell) -> float:
        """A guess at one run's time: bytes read per step over the device's bandwidth."""
        config = CONFIGS[self.model]
        read = config.weight_bytes + cell.batch * cell.context * config.kv_token_bytes
        return self.tokens * max(read / _BANDWIDTH, 2e-3)

    def prime_seconds(self, cell: Cell) -> float:
        return cell.batch * cell.context * CONFIGS[self.model].weight_bytes / _PREFILL_FLOPS

    def total_seconds(self) -> float:
        """A guess at all of it: starts, primings, runs."""
        runs = (1 + self.repeats) * (1 + len(self.taus) + len(self.rivals) * len(self.taus[-1:]))
        engines = 2 + len(self.rivals)
        each = sum(runs * self.seconds(cell) + engines * self.prime_seconds(cell) for cell in self.cells)
        return each + engines * _START_S[self.model]


def plans(models: Sequence[str], is_quick: bool, budget: str) -> list[Plan]:
    """One plan per model."""
    cells: tuple[tuple[int, int], ...] = ((1, 1), (32, 1), (8, 4))
    taus: tuple[float, ...] = (4.0,)
    rivals: tuple[str, ...] = ("ngram",)
    tokens, repeats = 64, 1
    if not is_quick:
        cells = ((1, 1), (4, 1), (16, 1), (64, 1), (128, 1), (256, 1), (32, 4), (8, 16), (1, 32))
        taus, rivals, tokens, repeats = tuple(DRAFTS), RIVALS, 128, 2
    made = tuple(Cell(batch, context << 10) for batch, context in cells)
    return [
        Plan(model=name, cells=made, taus=taus, rivals=rivals, tokens=tokens, repeats=repeats, budget=budget)
        for name in models
    ]


def probability(tau: float, drafts: int) -> float:
    """How often one draft must be right, each by itself, for a chain of `drafts` to yield `tau` tokens a step.

    tau = 1 + p + p^2 + ... + p^drafts, solved by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(drafts + 1)) < tau:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def recording(answer: Sequence[int], tau: float, key: str, vocab: int) -> list[int]:
    """The answer with as many tokens wrong as make drafts of it yield `tau` tokens a step.

    The oracle drafter drafts what is recorded, as a chain; so one engine serves every accuracy.
    """
    rng, right = random.Random(key), probability(tau, DRAFTS[tau])
    return [token if rng.random() < right else (token + 1) % vocab for token in answer]


def prompts(cell: Cell, vocab: int) -> list[list[int]]:
    """Random tokens: the context, and one token for the first step to compute."""
    rng = random.Random(f"{cell.batch}/{cell.context}")
    return [rng.choices(range(vocab), k=cell.context + 1) for _ in range(cell.batch)]


def key_of(cell: Cell, tau: float, request: int) -> str:
    """The oracle's key of one request."""
    return f"{tau:g}/{cell.batch}/{cell.context}/{request}"


def params(plan: Plan, cell: Cell, tau: float | None) -> list[dict[str, Any]]:
    """`SamplingParams` of each request: without drafts (tau None), or with ours."""
    made: list[dict[str, Any]] = []
    for i in range(cell.batch):
        values: dict[str, Any] = {"temperature": 1.0, "seed": i, "max_tokens": plan.tokens, "ignore_eos": True}
        if tau is not None:
            options = {"problem_id": key_of(cell, tau, i), "max_draft_tokens": DRAFTS[tau]}
            values["extra_args"] = {"spec_rollout": options}
        made.append(values)
    return made


def rival(name: str, tau: float, draft_folder: str) -> dict[str, Any]:
    """vLLM's `speculative_config`, told to accept drafts so that a step yields `tau` tokens.

    Random weights accept nobody's drafts, so acceptance is synthetic (vLLM's own option). What a method does not
    draft cannot be accepted: on random text `ngram` and `suffix` find little, and `tokens_per_step` says so.
    """
    config: dict[str, Any] = {
        "method": name,
        "num_speculative_tokens": DRAFTS[tau],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": tau,
    }
    if name == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if name == "draft_model":
        config["model"] = draft_folder
    return config
