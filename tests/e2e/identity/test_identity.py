"""The very tokens of stock vLLM, whatever is drafted.

Level B: our engine with drafts against our engine without: no token differs. Level C: against stock vLLM: no token
differs but proven floating-point ties. `make test` runs a short form; `pytest tests/e2e -m identity` the long one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import ALONE, Case, cases  # noqa: E402
from tests.e2e.identity.compare import Report, compare, run  # noqa: E402
from tests.e2e.identity.engines import engine, model  # noqa: E402
from tests.e2e.identity.fuzz import FuzzDrafter  # noqa: E402

pytestmark = pytest.mark.vllm

VOCAB = 400
TOTAL = Report()


@pytest.fixture(scope="module", autouse=True)
def _print_total() -> Any:
    yield
    print(f"\nidentity: {TOTAL}")
    if TOTAL.tokens >= 50_000:
        assert len(TOTAL.ties) <= TOTAL.tokens / 50_000, TOTAL.ties


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _check(path: str, dtype: str, requests: list[Case], rounds: int, **kwargs: Any) -> None:
    """Stock's answers, then ours with every kind of draft, then ours without."""
    with engine(path, dtype, is_ours=False, **kwargs) as stock:
        truth = run(stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    reports = []
    with engine(path, dtype, is_ours=True, **kwargs) as ours:
        plain = run(ours.llm, requests, enabled=False)
        for round_ in range(rounds):
            ours.runner.speculation.drafters = [
                FuzzDrafter(answers, VOCAB, seed=round_, quality=(0.8, 0.95, 0.2)[round_ % 3])
            ]
            ours.runner.stats.drafted = 0
            got = run(ours.llm, requests)
            assert ours.runner.stats.drafted > 0
            level_b = compare(requests, plain, got, dtype, stock=None)
            assert not level_b.failures, level_b.failures[:10]
            reports.append(got)
    with engine(path, dtype, is_ours=False, max_logprobs=-1, **kwargs) as stock:
        for got in reports:
            level_c = compare(requests, truth, got, dtype, stock.llm)
            TOTAL.add(level_c)
            assert not level_c.failures, level_c.failures[:10]


@pytest.mark.parametrize(("arch", "dtype"), [("qwen3", "bfloat16"), ("llama", "float32"), ("mistral", "bfloat16")])
def test_every_feature_yields_stocks_tokens_whatever_is_drafted(models: Path, arch: str, dtype: str) -> None:
    _check(model(models, arch, dtype), dtype, cases(58, VOCAB, seed=1, max_tokens=40), rounds=1)


def test_chosen_logprobs_are_stocks_whatever_is_drafted(models: Path) -> None:
    requests = cases(6, VOCAB, seed=3, max_tokens=30, only=ALONE)
    _check(model(models, "qwen3", "float32"), "float32", requests, rounds=1)


@pytest.mark.identity
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral"])
def test_long_every_feature_yields_stocks_tokens_whatever_is_drafted(models: Path, arch: str, dtype: str) -> None:
    _check(model(models, arch, dtype, size="3M"), dtype, cases(120, VOCAB, seed=2, max_tokens=90), rounds=3)
