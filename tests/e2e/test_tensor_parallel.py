"""Two CPU ranks: the same tokens as one rank with drafts off, drafts made by the first rank alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import warm

ROOT = Path(__file__).parents[2]

SCRIPT = """
import gc, json, os, sys
from collections import Counter
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

from tests.e2e.pausing import Always
from vllm_specrollout import load_drafter

class Raises(Always):
    name = "raises"
    steps = 0

    def propose(self, batch, limits):
        self.steps += 1
        if self.steps > 4:
            raise RuntimeError("out of ideas")
        return super().propose(batch, limits)

def give_the_first_rank_a_bad_drafter(worker):
    speculator = worker.model_runner.spec_rollout
    speculator.guard.is_strict = False
    if speculator.drafters:
        speculator.replace_drafters([Raises()])
        return True
    return False

def make_the_model_fail_on_the_first_rank(worker):
    runner = worker.model_runner
    runner.spec_rollout.guard.is_strict = False
    if runner.drafting.is_drafting:
        def raises(batch, limits):
            raise RuntimeError("out of ideas")
        runner.model_drafter.propose = raises

def has_a_model(worker):
    return worker.model_runner.model_drafter is not None

def head(worker):
    runner = worker.model_runner
    heads = runner.model_drafter.heads
    return [heads.number, heads.went_back, runner.swapper._before is None]

def answer(model, spec_rollout):
    llm = LLM(model, dtype="float32", tensor_parallel_size=2, enforce_eager=True, max_model_len=256, max_num_seqs=8,
              disable_log_stats=False, additional_config={"spec_rollout": spec_rollout})
    prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42, 9 + i, 40, 41, 42, 9 + i]} for i in range(8)]
    params = [SamplingParams(temperature=0.0 if i % 3 == 0 else 0.8, seed=i, max_tokens=50, ignore_eos=True,
                             logprobs=1) for i in range(8)]
    out = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.collective_rpc("spec_rollout_stats") if spec_rollout else [{}]
    counted = Counter()
    for sample in [sample for metric in REGISTRY.collect() for sample in metric.samples]:
        ours = sample.name == "vllm:spec_rollout_nodes_total"
        counted[sample.labels["stage"] if ours else sample.name] += sample.value if ours else 0
    result = {"counted": counted, "tokens": [list(o.outputs[0].token_ids) for o in out],
              "drafted": [s.get("drafted", 0) for s in stats], "accepted": [s.get("accepted", 0) for s in stats]}
    if spec_rollout and spec_rollout.get("speculative_config"):
        bad = spec_rollout["speculative_config"]["model"] + "-bad"
        if os.path.isdir(bad):
            result["loaded"] = load_drafter(llm, bad), llm.collective_rpc(head)
            llm.reset_prefix_cache()
            out = llm.generate(prompts, params, use_tqdm=False)
            result["tokens amid"] = [list(o.outputs[0].token_ids) for o in out]
            result["judged"] = llm.collective_rpc(head)
        llm.collective_rpc(make_the_model_fail_on_the_first_rank)
        out = llm.generate(prompts, params, use_tqdm=False)
        result["tokens after"] = [list(o.outputs[0].token_ids) for o in out]
        result["has model"] = llm.collective_rpc(has_a_model)
    elif spec_rollout:
        result["given"] = llm.collective_rpc(give_the_first_rank_a_bad_drafter)
        out = llm.generate(prompts, params, use_tqdm=False)
        result["tokens after"] = [list(o.outputs[0].token_ids) for o in out]
        result["failures"] = [s["failures"] for s in llm.collective_rpc("spec_rollout_stats")]
    llm.llm_engine.engine_core.shutdown()
    return result

def main():
    model, *arms = sys.argv[1:]
    results = []
    for arm in arms:
        results.append(answer(model, json.loads(arm)))
        gc.collect()
    print("RESULT" + json.dumps(results))

if __name__ == "__main__":
    main()
"""


def _run(model: str, folder: Path, *arms: object) -> list[dict[str, Any]]:
    """All engines in one process, one after the other."""
    script = folder / "run.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # a function is sent to the workers
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    done = warm.run([str(script), model, *map(json.dumps, arms)], environment, folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]
MODELS = ("eagle", "draft_model")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of stock, of a host drafter and of each model that drafts."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    from tests.e2e.drafting_models import copied, eagle_head, perturbed

    folder = tmp_path_factory.mktemp("ranks")
    # two heads for keys and values, one for each rank
    model = str(make_random_model(folder / "model", arch="llama", size="3M", dtype="float32"))
    copied(model, folder / "draft-bad", lambda weight: weight.flip(0) * 1e-3)
    drafters = (eagle_head(model, folder / "head"), perturbed(model, folder / "draft", 0.1))
    given = [
        {"method": name, "model": path, "num_speculative_tokens": 3}
        for name, path in zip(MODELS, drafters, strict=True)
    ]
    of_models = [{"budget": "fixed", "drafters": [], "speculative_config": one} for one in given]
    arms = _run(model, folder, False, {"budget": "fixed", "ngram": {"min_match": 1}}, *of_models)
    return dict(zip(("stock", "ngram", *MODELS), arms, strict=True))


def test_two_ranks_verify_the_same_trees_and_yield_stocks_tokens_even_if_a_drafter_raises(
    answers: dict[str, dict[str, Any]],
) -> None:
    stock, ours = answers["stock"], answers["ngram"]
    assert ours["tokens"] == stock["tokens"]
    assert len(ours["drafted"]) == 2 and ours["drafted"][0] == ours["drafted"][1] > 0
    assert ours["accepted"][0] == ours["accepted"][1] > 0
    # once, not once per rank
    assert ours["counted"]["verified"] == ours["drafted"][0]
    assert ours["counted"]["accepted"] == ours["accepted"][0]
    assert not any("spec_rollout" in name for name in stock["counted"])
    # a drafter that raises on the rank that drafts: the other one is told, and waits for nothing
    assert ours["given"] == [True, False]
    assert ours["tokens after"] == stock["tokens"]
    assert ours["failures"] == [{"drafter raises": 1}, {}]


def test_two_ranks_have_a_new_head_at_one_step_and_go_back_together(answers: dict[str, dict[str, Any]]) -> None:
    """The first rank judges; each has the head's part, and an old part to go back to."""
    stock, ours = answers["stock"], answers["draft_model"]
    assert ours["loaded"] == [1, [[1, 0, False]] * 2]
    assert ours["tokens amid"] == stock["tokens"]
    assert ours["judged"] == [[0, 1, True]] * 2


@pytest.mark.parametrize("method", MODELS)
def test_two_ranks_run_a_model_that_drafts_and_yield_stocks_tokens_even_if_it_fails(
    answers: dict[str, dict[str, Any]], method: str
) -> None:
    stock, ours = answers["stock"], answers[method]
    assert ours["tokens"] == stock["tokens"]
    assert ours["drafted"][0] == ours["drafted"][1] > 0
    assert ours["accepted"][0] == ours["accepted"][1]
    assert method == "eagle" or ours["accepted"][0] > 100
    # the rank that decides has lost its model: the other one has none either, and waits for nothing
    assert ours["tokens after"] == stock["tokens"] and ours["has model"] == [False, False]
