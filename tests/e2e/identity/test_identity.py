"""The very tokens of stock vLLM, whatever is drafted.

Level B: our engine with drafts against our engine without: no token differs. Level C: against stock vLLM: no token
differs but proven floating-point ties. `make test` runs a short form; `pytest tests/e2e -m identity` the long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import ALONE, cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import model


@pytest.mark.parametrize(("arch", "dtype"), [("qwen3", "bfloat16"), ("llama", "float32"), ("mistral", "bfloat16")])
def test_every_feature_yields_stocks_tokens_whatever_is_drafted(models: Path, arch: str, dtype: str) -> None:
    check_identity(model(models, arch, dtype), dtype, cases(58, VOCAB, seed=1, max_tokens=40), rounds=1)


def test_chosen_logprobs_are_stocks_whatever_is_drafted(models: Path) -> None:
    requests = cases(6, VOCAB, seed=3, max_tokens=30, only=ALONE)
    check_identity(model(models, "qwen3", "float32"), "float32", requests, rounds=1)


def test_the_united_trees_of_several_drafters_yield_stocks_tokens(models: Path) -> None:
    requests = cases(16, VOCAB, seed=5, max_tokens=30)
    check_identity(model(models, "qwen3", "float32"), "float32", requests, num_drafters=2)


@pytest.mark.identity
# in bfloat16, where rows are unlike, a stock engine repeats whole batches to prove each tie
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral"])
def test_long_every_feature_yields_stocks_tokens_whatever_is_drafted(models: Path, arch: str, dtype: str) -> None:
    check_identity(model(models, arch, dtype, size="3M"), dtype, cases(120, VOCAB, seed=2, max_tokens=130), rounds=3)


def test_the_check_itself_notices_noise_of_the_wrong_position(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that cannot fail proves nothing: shift the noise of drafted rows by one position, and it must."""
    from vllm_specrollout.worker.v1 import sampler as noise

    right = noise.node_seeds
    monkeypatch.setattr(noise, "node_seeds", lambda entries, start, depth: right(entries, start, depth + (depth > 0)))
    sampled = cases(6, VOCAB, seed=4, max_tokens=30, only=("temperature 1",))
    with pytest.raises(AssertionError, match="token"):
        check_identity(model(models, "qwen3", "bfloat16"), "bfloat16", sampled)
