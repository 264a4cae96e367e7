"""The requests of the identity suite: every sampling feature, alone and mixed, with prompts of many lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams


@dataclass(frozen=True)
class Case:
    """One request; `problem_id` is how drafters find its recorded answer."""

    name: str
    problem_id: str
    prompt: list[int]
    params: dict[str, Any]
    # None: text alone
    image: Any = None

    @property
    def asked(self) -> dict[str, Any]:
        """The prompt, as vLLM takes it."""
        shown = {} if self.image is None else {"multi_modal_data": {"image": self.image}}
        return {"prompt_token_ids": self.prompt, **shown}

    def sampling(self, **spec_rollout: Any) -> SamplingParams:
        params = dict(self.params)
        if isinstance(params.get("structured_outputs"), dict):
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        options = {"problem_id": self.problem_id, **spec_rollout}
        return SamplingParams(**params, extra_args={"spec_rollout": options})


def features(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Sampling parameters by feature name; all but the greedy ones are seeded later."""
    some = list(range(5, vocab_size, 3))
    return {
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "temperature 1": {"ignore_eos": True},
        "temperature 0.7": {"temperature": 0.7, "ignore_eos": True},
        "temperature 1.5": {"temperature": 1.5},
        "top_k": {"top_k": 12},
        "top_p": {"top_p": 0.8},
        "top_k and top_p": {"top_k": 40, "top_p": 0.9, "temperature": 0.9},
        "min_p": {"min_p": 0.05, "ignore_eos": True},
        "min_p and top_p": {"min_p": 0.02, "top_p": 0.95},
        "presence penalty": {"presence_penalty": 1.2, "ignore_eos": True},
        "frequency penalty": {"frequency_penalty": 0.7, "ignore_eos": True},
        "repetition penalty": {"repetition_penalty": 1.3, "ignore_eos": True},
        "all penalties, greedy": {
            "temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
            "ignore_eos": True,
        },  # fmt: skip
        "bad words": {"bad_words": ["wait", "1 2", "= 3"], "ignore_eos": True},
        "logit bias": {"logit_bias": {7: 4.0, 30: -6.0, 31: 2.5}, "ignore_eos": True},
        "logit bias, greedy": {"temperature": 0.0, "logit_bias": {7: 3.0, 30: 2.0}, "ignore_eos": True},
        "allowed tokens": {"allowed_token_ids": some, "ignore_eos": True},
        "min_tokens": {"min_tokens": 30, "stop_token_ids": list(range(5, 60))},
        "stop tokens": {"stop_token_ids": list(range(5, 25)), "temperature": 1.2},
        "stop strings": {"stop": ["12", "= ", "7"], "temperature": 1.2},
        "stop strings kept": {"stop": ["12", "+ ", "9"], "include_stop_str_in_output": True},
        "logprobs": {"logprobs": 5, "ignore_eos": True},
        "logprobs 0": {"logprobs": 0, "top_p": 0.9},
        "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
        "chosen logprobs": {"logprob_token_ids": [5, 9, 40], "ignore_eos": True},
        "n 3": {"n": 3, "ignore_eos": True},
        "regex": {"structured_outputs": {"regex": "[0-9]{3,9}( [+] [0-9]{1,4}){2,6}"}},
        "choice": {"structured_outputs": {"choice": ["12 + 34", "12 + 35 = 47", "7"]}},
        "json": {"structured_outputs": {"json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
            "required": ["a", "b"], "additionalProperties": False,
        }}},
        "everything": {
            "temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.3,
            "frequency_penalty": 0.2, "repetition_penalty": 1.05, "bad_words": ["wait"], "logit_bias": {8: 1.0},
            "min_tokens": 8, "logprobs": 3,
        },
    }  # fmt: skip


ALONE = ("chosen logprobs",)
"""Stock vLLM gives other requests of the batch wrong logprobs beside these, so they get a batch of their own."""


THINKING = {"reasoning_start_str": "Step", "reasoning_end_str": "OK"}
"""A `reasoning_config`: with it, requests may have a `thinking_token_budget`."""
BEGINS, ENDS = 270, 277
"""The tokens of that."""


def cases(count: int, vocab_size: int, seed: int = 0, max_tokens: int = 64, only: tuple[str, ...] = ()) -> list[Case]:
    """`count` requests, going round the features; some share their prompt's beginning."""
    rng = np.random.default_rng(seed)
    known = {k: v for k, v in features(vocab_size).items() if (k in only if only else k not in ALONE)}
    shared = rng.integers(5, vocab_size, 150).tolist()
    out = []
    for i in range(count):
        name = list(known)[i % len(known)]
        params = {"max_tokens": int(rng.integers(1, 2 * max_tokens)), **known[name]}
        if "min_tokens" in params:
            params["min_tokens"] = min(params["min_tokens"], 2 * max_tokens)
        params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
        if params.get("temperature", 1.0) > 0:
            params["seed"] = int(rng.integers(0, 2**31))
        length = int(rng.choice([1, 3, 17, 31, 32, 33, 64, 90]))
        head = shared[: int(rng.choice([32, 100, 150]))] if rng.random() < 0.3 else []
        out.append(Case(name, str(i), head + rng.integers(5, vocab_size, length).tolist(), params))
    return out
