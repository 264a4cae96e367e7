"""What users give a group, checked before a process is begun or a request is dealt."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_specrollout.cluster.group.coordinator import MODES, Rules
from vllm_specrollout.cluster.group.messages import LIMIT
from vllm_specrollout.config.checks import check_choice
from vllm_specrollout.errors import ConfigError, shown

LADDERS = ("off", *MODES)
_GREEDY = 1e-5


def rules(ladder: str, methods: Sequence[str], most: int, drafter: str | Sequence[str]) -> Rules | None:
    """What the coordinator may decide; None: nobody helps anybody."""
    check_choice("ladder", ladder, LADDERS)
    if not isinstance(drafter, str) and not all(isinstance(model, str) and model for model in drafter):
        raise ConfigError(f"`drafter` is {drafter!r}", "name a model, or a list of models")
    if (ladder == "attach") != bool(drafter):
        raise ConfigError(
            f"`ladder` is {ladder!r}, and `drafter` is {drafter!r}",
            "drafters are attached with `ladder` `attach`, and that needs one",
        )
    if ladder == "off":
        return None
    return replace(Rules(mode=ladder, most=most), methods=tuple(methods))


def most_nodes(spec_rollout: bool | Mapping[str, Any]) -> int | None:
    """As the workers' own drafters would have it; None: the default. What is wrong with it, a worker says."""
    own = spec_rollout.get("decoupled") if isinstance(spec_rollout, Mapping) else None
    most = own.get("most_nodes") if isinstance(own, Mapping) else None
    return most if isinstance(most, int) else None


def tokens(number: int, prompt: Sequence[int]) -> tuple[int, ...]:
    """[P] token ids of a prompt, which a worker can be told."""
    try:
        found = tuple(int(operator.index(token)) for token in prompt)
    except TypeError:
        raise ConfigError(
            f"prompt {number} of `prompt_token_ids` is {shown(prompt)}, and not whole numbers alone",
            "give a list of token ids for each prompt, as [[1, 2], [3]]",
        ) from None
    wrong = next((token for token in found if not 0 <= token < LIMIT), None)
    if wrong is not None:
        raise ConfigError(
            f"prompt {number} of `prompt_token_ids` holds {shown(wrong)}, outside 0 to {LIMIT - 1}",
            "give the tokenizer's ids, without padding",
        )
    return found


def params(given: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Arguments of `SamplingParams`, with a seed if it samples: every copy of the request has the same noise."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"`sampling_params` holds a {type(given).__name__}", 'give its arguments, as {"max_tokens": 64}'
        )
    found = dict(given)
    for key, allowed in (("n", (1,)), ("logprobs", (None, 0)), ("prompt_logprobs", (None,))):
        if key in found and found[key] not in allowed:
            raise ConfigError(
                f"`{key}` is {found[key]!r}, and a group takes {' or '.join(map(str, allowed))}",
                "ask for each answer by itself, with a seed of its own; or use one engine",
            )
    if found.get("seed") is None and found.get("temperature", 1.0) >= _GREEDY:
        found["seed"] = rng.randrange(1 << 62)
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`sampling_params` cannot be written as JSON: {error}", "use plain values") from None
    return found
