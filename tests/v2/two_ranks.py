"""Run by test_tensor_parallel.py: one engine on two ranks, its answers printed. Ranks import this file anew."""

import json
import sys

import tests.v2.interpreter  # noqa: F401 - in every rank, before vLLM is imported
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


def main() -> None:
    from vllm import LLM

    from tests.e2e.identity.compare import run

    model, spec_rollout = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model, dtype="float32", tensor_parallel_size=2, enforce_eager=True,
        additional_config={"spec_rollout": spec_rollout}, **ENGINE,
    )  # fmt: skip
    out = run(llm, requests())
    stats = llm.collective_rpc("spec_rollout_stats") if spec_rollout else []
    print("RESULT" + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in out], "stats": stats}))


if __name__ == "__main__":
    main()
