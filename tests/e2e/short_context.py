"""A model that drafts and whose context is shorter than its target's: the same short requests before long ones and
after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams

from tests.e2e.identity.engines import Engine


def with_context(model: str, positions: int) -> str:
    """A model whose configuration says that it has so many positions."""
    path = Path(model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions}))
    return model


def check_around_long_ones(
    ours: Engine, context: int, *, count: int, prompt: int, answer: int, long: tuple[int, int], times: int = 1
) -> None:
    """Short requests are drafted for as before, long ones up to the model's context, and all tokens are the target's.

    Args:
        count: of the short requests.
        prompt, answer: tokens of a short one, which ends within the context.
        long: tokens of the longer prompts, which begin with a short one, and of the longer answers.
        times: that the long ones come.
    """
    drafter, reached = ours.runner.model_drafter, [0]
    run_pass = drafter.proposer._pass

    def noted(seats: Any, rows: Any, index: Any, next_tokens: Any, depth: int) -> None:
        # the token behind a request's rows is the draft's root
        reached.append(int(rows.positions[np.concatenate(index)].max()) + 1 + depth)
        run_pass(seats, rows, index, next_tokens, depth)

    def asked(names: range, tokens: int, most: int, **spec_rollout: Any) -> tuple[list[list[int]], int, int]:
        before = ours.llm.collective_rpc("spec_rollout_stats")[0]
        found = ours.llm.generate(
            [{"prompt_token_ids": [5 + (7 * i * i + 3 * i * name) % 90 for i in range(tokens)]} for name in names],
            [
                SamplingParams(seed=name, max_tokens=most, ignore_eos=True, extra_args={"spec_rollout": spec_rollout})
                for name in names
            ],
            use_tqdm=False,
        )
        now = ours.llm.collective_rpc("spec_rollout_stats")[0]
        tokens_of = [list(one.outputs[0].token_ids) for one in found]
        return tokens_of, now["drafted"] - before["drafted"], now["accepted"] - before["accepted"]

    drafter.proposer._pass = noted
    # what it learns of the long ones is not to change its drafts for the short ones
    drafter.coupling.pin(1.0, 1.0)
    short, longer = range(count), range(2)
    truth, drafted, _ = asked(short, prompt, answer, enabled=False)
    assert drafted == 0
    first, drafted, accepted = asked(short, prompt, answer)
    assert accepted > 0
    for _ in range(times):
        assert asked(longer, prompt, long[1])[1] > 0
        assert asked(longer, long[0], answer)[1] == 0, "nothing is drafted behind the context"
    again, drafted_again, accepted_again = asked(short, prompt, answer)
    assert max(reached) <= context
    assert first == again == truth
    assert accepted_again / drafted_again >= 0.9 * accepted / drafted
