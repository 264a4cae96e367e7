"""In stock vLLM, an inflated model yields the very tokens of the small one, greedy and seeded.

In fp32, where other sums' order moves logits by about 1e-6; in bf16 it may move a near tie (see the README).
"""

import pytest

pytest.importorskip("vllm")

from bench.policy.inflate import inflate
from bench.policy.random_model import make_random_model
from bench.policy.reward import problems
from bench.policy.shapes import Shape

SMALL = {"size": "1M", "hidden": 64, "num_layers": 2}
GROWN = Shape(hidden=256, num_layers=4, intermediate=512, num_heads=8, num_kv_heads=2)
CHATS = [[{"role": "user", "content": problem.prompt}] for problem in problems(6, seed=0)]


def _tokens(folder):
    """Token ids of every chat: greedy, then with one seed each at temperature 1."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), enforce_eager=True, max_model_len=512, dtype="float32", max_num_seqs=16)
    kinds = [{"temperature": 0.0}] * len(CHATS) + [{"temperature": 1.0, "seed": i} for i in range(len(CHATS))]
    params = [SamplingParams(**kind, max_tokens=48, ignore_eos=True, detokenize=False) for kind in kinds]
    results = engine.chat(CHATS * 2, params, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    return [list(result.outputs[0].token_ids) for result in results]


def test_inflated_model_yields_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    small = make_random_model(tmp_path / "small", seed=3, dtype="float32", **SMALL)
    want, got = _tokens(small), _tokens(inflate(small, tmp_path / "grown", GROWN))
    assert {len(tokens) for tokens in want} == {48}
    assert want == got
