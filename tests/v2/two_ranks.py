"""Run by test_tensor_parallel.py: one engine on two ranks, its answers printed. Ranks import this file anew."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import tests.v2.interpreter  # noqa: F401 - in every rank, before vLLM is imported
from bench.runner.oracle import ORACLE
from tests.e2e.identity.cases import Case

ENGINE = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def requests() -> list[Case]:
    """Greedy, with a penalty, with a grammar, and one with nothing."""
    own = [
        {"temperature": 0.0},
        {"frequency_penalty": 0.5},
        {"structured_outputs": {"regex": "[0-9]{20}"}},
        {},
    ]
    common = {"temperature": 0.9, "max_tokens": 7, "ignore_eos": True, "logprobs": 1}
    return [
        Case("two ranks", str(i), [9 + i, 40, 41, 42, 43 + i], {**common, "seed": i, **params})
        for i, params in enumerate(own)
    ]


def make_drafting_fail_on_the_first_rank(worker: Any) -> None:
    runner = worker.model_runner
    runner.spec_rollout.guard.is_strict = False

    def raises(*_: object) -> None:
        raise RuntimeError("out of ideas")

    if runner.drafting.is_drafting:
        runner.drafts._choose = raises


def failures(worker: Any) -> int:
    return worker.model_runner.spec_rollout.guard.failures.get("drafting", 0)


def answer(model: str, spec_rollout: Any) -> dict[str, Any]:
    from vllm import LLM

    from tests.e2e.identity.compare import run

    llm = LLM(
        model, dtype="float32", tensor_parallel_size=2, enforce_eager=True,
        additional_config={"spec_rollout": spec_rollout}, **ENGINE,
    )  # fmt: skip

    def tokens() -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in run(llm, requests())]

    found: dict[str, Any] = {
        "tokens": tokens(),
        "stats": llm.collective_rpc("spec_rollout_stats") if spec_rollout else [],
    }
    if spec_rollout and "speculative_config" in spec_rollout:
        llm.collective_rpc(make_drafting_fail_on_the_first_rank)
        found["tokens after"], found["failures"] = tokens(), llm.collective_rpc(failures)
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    """Stock's answers, then ours, drafted by an oracle of stock's and by a model; in one process, whose imports take
    the longest."""
    model, recorded, drafter = sys.argv[1:]
    stock = answer(model, False)
    Path(recorded).write_text(json.dumps({str(i): tokens for i, tokens in enumerate(stock["tokens"])}))
    gc.collect()
    own = {"budget": "fixed", "max_draft_tokens": 6}
    oracle = {"name": ORACLE, "path": recorded, "accuracy": [0.5, 0.4], "seed": 3}
    by_oracle = answer(model, {**own, "drafters": [oracle]})
    gc.collect()
    given = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    by_model = answer(model, {**own, "drafters": [], "speculative_config": given})
    print("RESULT" + json.dumps([stock, by_oracle, by_model]))


if __name__ == "__main__":
    main()
