"""The short identity suite, for whichever vLLM this process runs: `python -m tests.versions.suite V1|V2`.

Stock's answers, then ours with fuzzed trees and with fuzzed chains, each against stock's token by token. The last line
is a JSON object: what was compared, and what differed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

FEATURES = (
    "greedy",
    "temperature 1",
    "top_k and top_p",
    "repetition penalty",
    "all penalties, greedy",
    "logprobs",
    "n 3",
    "regex",
    "stop strings",
)
SHAPES = ("tree", "chain")


@dataclass
class Result:
    """One run of the suite."""

    vllm: str
    runner: str
    features: list[str] = field(default_factory=lambda: list(FEATURES))
    requests: int = 0
    tokens: int = 0
    ties: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    # by shape: draft tokens that were accepted
    accepted: dict[str, int] = field(default_factory=dict)
    # steps in which a branch was accepted
    branches: int = 0


def compare_all(runner: str) -> Result:
    """Run it. The environment has chosen the runner before vLLM was imported."""
    from tests.e2e.identity.cases import cases
    from tests.e2e.identity.check import VOCAB, judged
    from tests.e2e.identity.compare import run
    from tests.e2e.identity.engines import engine
    from tests.e2e.identity.fuzz import FuzzDrafter
    from vllm_specrollout.patches import supported

    dtype, is_v2 = ("float32", True) if runner == "V2" else ("bfloat16", False)
    version = supported.installed_vllm()
    assert version is not None
    result = Result(version, runner)
    requests = cases(len(FEATURES) * (1 if is_v2 else 4), VOCAB, seed=16, max_tokens=8 if is_v2 else 32, only=FEATURES)
    settings = {"max_num_seqs": 16, "max_model_len": 320}
    with tempfile.TemporaryDirectory() as folder:
        path = _model(Path(folder), dtype, is_v2)
        with engine(path, dtype, is_ours=False, **settings) as stock:
            truth = run(stock.llm, requests)
        answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
        for shape in SHAPES:
            drafts = {"max_draft_tokens": 6 if is_v2 else 12, "max_depth": 6 if is_v2 else 12, "shape": shape}
            with engine(path, dtype, is_ours=True, spec_rollout=drafts, **settings) as ours:
                assert ours.runner.shape[0].value == shape, ours.runner.shape
                ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=1)])
                drafted = run(ours.llm, requests)
                result.accepted[shape] = ours.runner.stats.accepted
                result.branches += ours.runner.stats.branches_committed
            report = judged(path, dtype, requests, truth, drafted, **settings)
            result.requests += report.requests
            result.tokens += report.tokens
            result.ties += report.ties
            result.failures += report.failures
    return result


def _model(folder: Path, dtype: str, is_v2: bool) -> str:
    if is_v2:
        from tests.v2.models import small_model

        return small_model(folder, "qwen3", dtype)
    from tests.e2e.identity.engines import model

    return model(folder, "qwen3", dtype)


if __name__ == "__main__":
    if sys.argv[1] == "V2":
        import tests.v2.interpreter  # noqa: F401 - before vLLM is imported
    print(json.dumps(asdict(compare_all(sys.argv[1]))))
