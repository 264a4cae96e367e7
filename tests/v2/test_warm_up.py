"""The first requests find every kernel compiled, and nothing that tells of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_specrollout.kernels.draft_choice import kernel as draft_choice
from vllm_specrollout.kernels.kv_commit import kernel as kv_commit
from vllm_specrollout.kernels.lookup import kernel as lookup
from vllm_specrollout.kernels.tree_attention import kernel as tree_attention
from vllm_specrollout.kernels.tree_rows import kernel as tree_rows
from vllm_specrollout.kernels.tree_verify import kernel as tree_verify

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.launches import Key, watch
from tests.v2.models import small_model
from vllm_specrollout.worker import request
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.v2.self_check import SelfCheck
from vllm_specrollout.worker.v2.worker import warm_up

KERNELS = (
    (tree_attention, "_attend"),
    (tree_verify, "_sample_blocks"),
    (tree_verify, "_walk_trees"),
    (kv_commit, "_move"),
    (tree_rows, "_lay_out"),
    (draft_choice, "_choose"),
)
LOOKUPS = ((lookup, "_scan"), (lookup, "_vote"))
ENGINE: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 900, "max_num_batched_tokens": 640}


def _rollout(ours: Engine) -> None:
    """Plain sampling and processed, short contexts and long, drafts alone and beside prompts."""
    requests = cases(6, VOCAB, seed=1, max_tokens=6, only=("greedy", "temperature 1", "top_p"))
    long = Case("long", "long", [5 + i % 50 for i in range(700)], {"max_tokens": 4, "seed": 1})
    truth = run(ours.llm, [*requests, long], enabled=False)
    answers = {
        case.problem_id: list(output.outputs[0].token_ids)
        for case, output in zip([*requests, long], truth, strict=True)
    }
    fuzz(ours, answers, 0, 0.9)
    for batch in (requests[:1], [*requests, long], [long]):
        ours.llm.reset_prefix_cache()
        run(ours.llm, batch)
    assert ours.runner.stats.branches_committed > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_rollout_launches_nothing_that_was_not_compiled_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    keys: list[Key] = watch(monkeypatch, *KERNELS)
    path = small_model(tmp_path, "qwen3", dtype)
    with engine(path, dtype, is_ours=True, spec_rollout={"max_draft_tokens": 8}, **ENGINE) as ours:
        compiled = set(keys)
        keys.clear()
        _rollout(ours)
    assert {name for name, *_ in keys} == {"_attend", "_sample_blocks", "_walk_trees", "_move", "_lay_out", "_choose"}
    assert not (set(keys) - compiled)


def test_lookups_of_a_group_launch_nothing_that_was_not_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Key] = watch(monkeypatch, *LOOKUPS)
    path = small_model(tmp_path, "qwen3", "float32")
    asked = Case("group", "group", list(range(5, 25)), {"max_tokens": 6, "n": 3, "ignore_eos": True, "seed": 1})
    stopped = Case("ends", "ends", list(range(5, 25)), {"max_tokens": 6, "stop_token_ids": [3, 4, 5], "seed": 1})
    own = {"drafters": ["history", "ngram"], "max_draft_tokens": 8}
    with engine(path, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        compiled = set(keys)
        keys.clear()
        for _ in range(2):
            run(ours.llm, [asked, stopped])
    assert {name for name, *_ in keys} == {"_scan", "_vote"}
    assert not (set(keys) - compiled)


def test_the_self_check_checks_what_steps_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another variant of a kernel would be compiled for the check alone, and be the one that is checked."""
    keys: list[Key] = watch(monkeypatch, *KERNELS)
    compiled: set[Key] = set()
    check = SelfCheck.run

    def run_noted(self: SelfCheck) -> None:
        compiled.update(keys)
        keys.clear()
        check(self)

    monkeypatch.setattr(SelfCheck, "run", run_noted)
    path = small_model(tmp_path, "qwen3", "float32")
    given = {"max_draft_tokens": 24, "self_check": "always"}
    with engine(path, "float32", is_ours=True, spec_rollout=given, **ENGINE) as ours:
        assert ours.runner.self_check["state"] == "passed"
    assert {name for name, *_ in keys} == {name for _, name in KERNELS}
    assert not set(keys) - compiled


def _vllms_kernels() -> list[tuple[Any, str]]:
    """(module, name) of all that its runner may launch, and of whatever they call."""
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu.warmup  # noqa: F401

    modules = [
        module for name, module in sys.modules.items() if name.startswith(("vllm.v1.worker.", "vllm.v1.sample."))
    ]
    return [
        (module, name)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, InterpretedFunction)
    ]


def test_vllms_own_warm_up_leaves_nothing_behind_and_no_step_with_drafts_compiles_a_kernel_of_its_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU vLLM runs requests of its own at start; those of plain steps are then compiled."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels
    from vllm.v1.worker.worker_base import CompilationTimes

    def as_on_a_gpu(self: Any) -> CompilationTimes:
        runner = self.model_runner
        warmup_kernels(runner, runner.execute_model, runner.sample_tokens)
        return CompilationTimes(0.0, 0.0)

    told: list[Any] = []
    monkeypatch.setattr(request.logger, "info_once", lambda *said, **options: told.append(said), raising=False)
    keys: list[Key] = watch(monkeypatch, *_vllms_kernels())
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", as_on_a_gpu)
    requests = cases(6, VOCAB, seed=3, max_tokens=6, only=("greedy", "temperature 1", "top_p", "frequency penalty"))
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 8}, **ENGINE) as ours:
        runner = ours.runner
        assert keys and runner.host.num_in_flight == 0 and not runner.admissions.reasons()
        assert dataclasses.asdict(runner.stats) == dataclasses.asdict(Stats()) and not runner.host.limits
        assert not told
        truth = run(ours.llm, requests, enabled=False)
        answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
        fuzz(ours, answers, 0, 0.9)
        compiled = set(keys)
        keys.clear()
        run(ours.llm, requests)
        assert runner.stats.branches_committed > 0
    late = sorted({key[0] for key in set(keys) - compiled})
    assert "_post_update_kernel" in {key[0] for key in keys} and not late


def _state(runner: Any) -> list[torch.Tensor]:
    """Copies of every tensor that a request's next token may depend on."""
    owners = (
        runner.req_states,
        runner.sampler.sampling_states,
        runner.input_buffers,
        runner.block_tables,
        runner.inputs,
    )
    tensors = [value for owner in owners for value in vars(owner).values()]
    tensors += [value.gpu for value in tensors if isinstance(getattr(value, "gpu", None), torch.Tensor)]
    return [t.clone() for t in (*tensors, *runner.kv_caches) if isinstance(t, torch.Tensor)]


@pytest.mark.nightly
def test_the_warm_up_leaves_no_trace_in_caches_and_states(tmp_path: Path) -> None:
    requests = cases(3, VOCAB, seed=2, max_tokens=6, only=("temperature 1", "greedy"))
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 8}, **ENGINE) as ours:
        run(ours.llm, requests)
        runner = ours.runner
        for cache in runner.kv_caches:
            cache.copy_(torch.randn_like(cache))
        before, totals = _state(runner), dataclasses.asdict(runner.stats)
        warm_up(runner)
        after = _state(runner)
        assert len(before) > 20 and len(before) == len(after)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert dataclasses.asdict(runner.stats) == totals and runner.host.num_in_flight <= 1


def test_where_branches_are_not_verified_only_what_judges_chains_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Key] = watch(monkeypatch, *KERNELS)
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout={"shape": "chain"}, **ENGINE):
        assert {name for name, *_ in keys} == {"_sample_blocks", "_walk_trees", "_lay_out", "_choose"}
