"""Schedules of faults over a live engine: every token is stock vLLM's, nobody is lost, nothing is left.

20 seeds here, 200 in `make faults`. A failing one prints what repeats it; engine and KV cache are shared by all.
"""

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.faults.acting import MOST_DRAFTED
from tests.faults.live import VOCAB, Answers, Live, norm_of, write
from tests.faults.schedule import ACTS
from tests.faults.seeds import ON_ENGINES, over_engine, repeatable, seeds

FEATURES = (
    *("greedy", "temperature 1", "top_k and top_p", "presence penalty", "stop tokens", "n 3"),
    *("regex", "choice", "logprobs"),
)
ROOM = {"max_model_len": 256, "max_num_seqs": 6, "block_size": 32}
# prompts come in pieces, and six requests do not fit
SMALL = {**ROOM, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 18}


def _cases() -> list[Case]:
    """The first one is long enough to be drafted for."""
    found = [Case("the first", "first", [9, 40, 41], {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16})]
    return found + cases(17, VOCAB, seed=11, max_tokens=14, only=FEATURES)


def _truth(path: str, requests: list[Case]) -> list[Answers]:
    """Stock's answers, under each set of weights."""
    found: list[Answers] = []
    with engine(path, "float32", is_ours=False, **ROOM) as stock:
        core = stock.llm.llm_engine.engine_core.engine_core
        norm = norm_of(core.model_executor.driver_worker.worker.model_runner)
        first = norm.clone()
        for weights in (0, 1):
            write(norm, first, weights)
            stock.llm.reset_prefix_cache()
            pairs = zip(requests, run(stock.llm, requests), strict=True)
            found.append({case.problem_id: [list(sample.token_ids) for sample in out.outputs] for case, out in pairs})
    assert found[0] != found[1]
    return found


def test_no_schedule_of_faults_changes_a_token_of_a_running_engine(tmp_path, monkeypatch) -> None:
    path, requests = model(tmp_path, "llama", "float32"), _cases()
    truth, every = _truth(path, requests), seeds(ON_ENGINES)
    settings = {
        "drafters": ["history", "ngram"],
        "max_draft_tokens": MOST_DRAFTED,
        "max_depth": 8,
        "history": {"dir": str(tmp_path / "history"), "max_mib": 1},
    }
    with engine(path, "float32", is_ours=True, spec_rollout=settings, **SMALL) as ours:
        live = Live(ours, requests, truth, monkeypatch)
        for seed in every:
            with repeatable(seed, __file__):
                live.meet(over_engine(seed))
                live.carry_out()
        accepted = ours.runner.stats.accepted
    total = f"{live.num_requests} requests, {live.num_tokens} tokens, {live.num_steps} steps"
    print(f"{len(every)} schedules, {total}: 0 differ, 0 lost, 0 left behind")
    if len(every) > 1:
        # that they try what they are for
        assert {act.what for seed in every for act in over_engine(seed).acts} == set(ACTS)
        assert live.failures == {"budget", "drafter broken"} and accepted > 10 * len(every)
