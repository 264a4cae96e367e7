"""In stock vLLM, an inflated model yields the very tokens of the small one, greedy and seeded.

In fp32, where other sums' order moves logits by about 1e-6: what differs must be a tie. In bf16 it may move a near tie
(see the README).
"""

import pytest
from transformers import AutoTokenizer
from vllm_specrollout.bench.policy.inflate import inflate
from vllm_specrollout.bench.policy.random_model import Shape, make_random_model
from vllm_specrollout.bench.policy.reward import problems

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import judged
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine

SMALL = {"size": "1M", "hidden": 64, "num_layers": 2}
GROWN = Shape(hidden=256, num_layers=4, intermediate=512, num_heads=8, num_kv_heads=2)
CHATS = [[{"role": "user", "content": problem.prompt}] for problem in problems(6, seed=0)]


def _requests(folder):
    """Every chat: greedy, then with one seed each at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    kinds = [{"temperature": 0.0}] * len(CHATS) + [{"seed": i} for i in range(len(CHATS))]
    return [
        Case("chat", str(i), prompt, {**kind, "max_tokens": 48, "ignore_eos": True})
        for i, (prompt, kind) in enumerate(zip(prompts * 2, kinds, strict=True))
    ]


@pytest.mark.nightly
def test_inflated_model_yields_the_same_tokens(tmp_path):
    small = make_random_model(tmp_path / "small", seed=3, dtype="float32", **SMALL)
    requests = _requests(small)
    answers = []
    for folder in (small, inflate(small, tmp_path / "grown", GROWN)):
        with engine(str(folder), "float32", is_ours=False) as stock:
            answers.append(run(stock.llm, requests))
    report = judged(str(small), "float32", requests, *answers)
    assert report.tokens == 48 * len(requests)
    assert not report.failures, report.failures
