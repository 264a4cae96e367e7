"""The short identity suite, for whichever vLLM this process runs: `python -m tests.versions.suite V1|V2 [models]`.

Stock's answers, then ours with fuzzed trees and with fuzzed chains, each against stock's token by token. With `models`:
trees of models that draft. The last line is a JSON object: what was compared, and what differed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_specrollout.patches import features
from vllm_specrollout.patches.features import Features

FEATURES = (
    *("greedy", "temperature 1", "top_k and top_p", "repetition penalty", "all penalties, greedy", "logprobs", "n 3"),
    *("regex", "stop strings"),
)
SHAPES = ("tree", "chain")
MODELS = ("draft_model", "eagle3")


def models_of(row: Features, runner: str) -> tuple[str, ...]:
    """The kinds of models that draft on a version's runner."""
    return MODELS if runner == "V1" or row.has_v2_models else ("eagle3",)


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
    # by shape, or by the kind of model: draft tokens that were accepted
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


def compare_models(runner: str) -> Result:
    """Each kind of model that drafts, over a target in float32 that has the layers an EAGLE-3 head takes."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    from tests.e2e.drafting_models import drafting_with
    from tests.e2e.identity.cases import cases
    from tests.e2e.identity.check import TOTAL, VOCAB, check_identity
    from tests.e2e.identity.engines import Engine
    from vllm_specrollout.patches import supported

    is_v2 = runner == "V2"
    version = supported.installed_vllm()
    assert version is not None
    result = Result(version, runner, list(FEATURES))
    requests = cases(len(FEATURES) * (1 if is_v2 else 3), VOCAB, seed=16, max_tokens=10 if is_v2 else 32, only=FEATURES)
    own = {"drafters": [], "max_draft_tokens": 6 if is_v2 else 12, "max_depth": 3}
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder, "target"))
        make_random_model(Path(target), arch="llama", size="1M", num_layers=4, dtype="float32", seed=7)
        for kind in models_of(features.installed(), runner):
            given = {**drafting_with(kind, target, Path(folder, kind)), "num_speculative_tokens": 3}

            def look(ours: Engine, kind: str = kind) -> None:
                assert ours.runner.shape[0].value == "tree", ours.runner.shape
                assert ours.runner.model_drafter is not None
                result.accepted[kind] = ours.runner.stats.accepted
                result.branches += ours.runner.stats.branches_committed

            try:
                check_identity(
                    target, "float32", requests, num_drafters=0, inspect=look, must_accept=not is_v2,
                    spec_rollout={**own, "speculative_config": given}, max_num_seqs=16, max_model_len=320,
                )  # fmt: skip
            except AssertionError as error:
                result.failures.append(f"{kind}: {error}")
    result.requests, result.tokens, result.ties = TOTAL.requests, TOTAL.tokens, TOTAL.ties
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
    compare_what = compare_models if "models" in sys.argv else compare_all
    print(json.dumps(asdict(compare_what(sys.argv[1]))))
