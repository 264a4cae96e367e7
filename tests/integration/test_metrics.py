"""An engine's metrics against its worker's own totals; and nothing of ours where spec rollout is off."""

import json

import pytest

from tests import warm
from tests.integration.serving import environment, result_of

PROGRAM = """
import json, sys
import vllm_specrollout
from vllm import LLM, SamplingParams
from prometheus_client import REGISTRY

model, spec = sys.argv[1], json.loads(sys.argv[2])
options = {"max_model_len": 256, "enforce_eager": True, "disable_log_stats": False, "max_num_seqs": 4}
llm = LLM(model, dtype="float32", spec_rollout=spec, **options)
prompts = [f"{i} 2 3 1 2 3 1 2 3 1 2" for i in range(4)]
params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
tokens = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
stats = llm.collective_rpc("spec_rollout_stats")[0] if spec else {}
samples = [
    [s.name, s.labels, s.value]
    for m in REGISTRY.collect() for s in m.samples if s.name.startswith(("vllm:spec_", "vllm:num_"))
]
print("RESULT" + json.dumps({"tokens": tokens, "stats": stats, "samples": samples}, default=str))
"""


def run(model, spec, in_one_process):
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_one_process else "1"}
    return result_of(warm.run(["-c", PROGRAM, str(model), json.dumps(spec)], {**environment(), **processes}))


def total(result, name, **labels):
    found = [v for n, own, v in result["samples"] if n == name and labels.items() <= own.items()]
    return sum(found)


@pytest.fixture(scope="module")
def off(model):
    return run(model, False, in_one_process=True)


@pytest.mark.parametrize(
    "in_one_process",
    [pytest.param(True, id="one-process", marks=pytest.mark.nightly), pytest.param(False, id="two-processes")],
)
def test_metrics_agree_with_the_worker_and_with_vllms_own(model, off, in_one_process):
    on = run(model, {"drafters": ["ngram"], "budget": "fixed", "max_draft_tokens": 4}, in_one_process)
    stats, ours = on["stats"], "vllm:spec_rollout_"
    assert stats["drafted"] > 0 and on["tokens"] == off["tokens"]
    assert total(on, ours + "nodes_total", stage="verified", source="ngram", engine="0") == stats["drafted"]
    assert total(on, ours + "nodes_total", stage="accepted", source="ngram") == stats["accepted"]
    assert total(on, ours + "nodes_total", stage="drafted") >= stats["drafted"]
    assert total(on, ours + "context_nodes_total", stage="verified", context="0") == stats["drafted"]
    assert total(on, "vllm:spec_decode_num_draft_tokens_total") == stats["drafted"]
    assert total(on, "vllm:spec_decode_num_drafts_total") > 0
    assert total(on, "vllm:spec_decode_num_accepted_tokens_total") == stats["accepted"]
    assert total(on, ours + "decisions_total", choice="on", reason="fixed") > 0
    assert total(on, ours + "is_on") == 1


def test_switched_off_there_is_nothing_of_ours(off):
    assert off["samples"] and not any("spec_rollout" in name for name, _, _ in off["samples"])
