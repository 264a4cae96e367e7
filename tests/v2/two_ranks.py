"""Run by test_tensor_parallel.py: one engine on two ranks, its answers printed. Ranks import this file anew."""

import json
import sys

import tests.v2.interpreter  # noqa: F401 - in every rank, before vLLM is imported

REQUESTS = 4


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    model, spec_rollout = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model, dtype="float32", tensor_parallel_size=2, enforce_eager=True, max_model_len=64, max_num_seqs=REQUESTS,
        max_num_batched_tokens=64, additional_config={"spec_rollout": spec_rollout},
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42, 43 + i]} for i in range(REQUESTS)]
    params = [
        SamplingParams(
            temperature=0.0 if i == 0 else 0.9, seed=i, max_tokens=7, ignore_eos=True, logprobs=1,
            frequency_penalty=0.5 if i == 1 else 0.0, extra_args={"spec_rollout": {"problem_id": str(i)}},
            structured_outputs=StructuredOutputsParams(regex="[0-9]{20}") if i == 2 else None,
        )
        for i in range(REQUESTS)
    ]  # fmt: skip
    out = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.collective_rpc("spec_rollout_stats") if spec_rollout else []
    print("RESULT" + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in out], "stats": stats}))


if __name__ == "__main__":
    main()
