"""Benchmarks as commands, and engine processes that answer at once.

Tokens follow from the request alone, times from the number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner

TOTALS = ("steps", "steps_with_drafts", "drafted", "accepted", "output_tokens", "request_steps")
TIMES = ("forward_ms", "step_ms", "draft_ms", "layout_ms")


def invoke(function: Callable[..., None], *arguments: Any) -> Result:
    """Run a benchmark's command by itself."""
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class FakeProcess:
    """Takes the place of `EngineProcess`; ours takes half of stock's steps."""

    # whether ours (or stock's second run of anything) yields another last token
    is_ours_wrong = False
    is_stock_unsteady = False

    def __init__(self, spec):
        self.spec, self.is_ours, self.runs, self.calls = spec, spec.spec_rollout is not None, 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.is_closed = True

    def quiet_in(self):
        return 0.0

    def ask(self, operation, **arguments):
        self.calls.append(operation)
        return getattr(self, f"_{operation}")(**arguments)

    def _encode(self, texts):
        return [[ord(letter) % 97 for letter in text] for text in texts]

    def _decode(self, token_ids):
        return ["The answer is 3." for _ in token_ids]

    def _block_size(self):
        return 32

    def _extend(self, prefixes, num_tokens, repeats, seed):
        return {n: [10.0 + n] * repeats for n in num_tokens}

    def _look(self, prompt, params, at, candidates):
        return {"token_ids": [0] * at, "logits": [0.0, -40.0], "width": 9}

    def _rpc(self, method, **_):
        self.calls.append(method)
        switches = {"switches": 1, "mind_changes": 0, "steps_on": 3, "steps_off": 2}
        return {"spec_rollout_switches": switches}.get(method)

    def _generate(self, prompts, params, stats, arrives_after=None, reload_after=None, folder=""):
        assert stats == self.is_ours and len(prompts) == len(params)
        assert arrives_after is None or len(arrives_after) == len(prompts)
        assert all(("extra_args" in one) <= self.is_ours for one in params)
        self.runs += 1
        token_ids = [random.Random(one["seed"]).choices(range(9), k=one["max_tokens"]) for one in params]
        if (self.is_ours and self.is_ours_wrong) or (not self.is_ours and self.is_stock_unsteady and self.runs > 1):
            token_ids[-1][-1] += 10 + self.runs
        steps = max(map(len, token_ids)) // (2 if self.is_ours else 1)
        ends = [0.01 * (i + 1) for i in range(steps)]
        reply = {"token_ids": token_ids, "finish_s": [ends[-1]] * len(prompts), "step_s": ends}
        if stats:
            batch = len(prompts)
            counts = dict.fromkeys(TOTALS, steps * batch) | {"steps": steps} | dict.fromkeys(TIMES, 1.0)
            reply["totals"] = counts
        return reply
