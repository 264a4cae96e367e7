"""Identity under what engines do to requests: chunking, preemption, aborts, adapters, windows, several cache groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import vllm._custom_ops

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, Accepted, at_a_steady_speed, check_identity, judged
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.identity.fuzz import FuzzDrafter
from tests.unlike import unlike_rows
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v1 import kv


def _simple(count: int, seed: int, length: int, max_tokens: int) -> list[Case]:
    """Seeded and greedy requests of one prompt length."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0 if i % 4 == 0 else 1.0}
        if i % 4:
            params["seed"] = i
        out.append(Case("plain", str(i), rng.integers(5, VOCAB, length).tolist(), params))
    return out


def test_prompts_prefilled_in_chunks_change_nothing(models: Path) -> None:
    """Stock CPU engines cannot chunk the prompt of a seeded request (they stop with an error), so stock does not."""
    check_identity(
        model(models, "qwen3", "bfloat16"),
        "bfloat16",
        _simple(10, seed=1, length=150, max_tokens=30),
        stock={"max_num_batched_tokens": 2048},
        max_num_batched_tokens=96,
    )


def test_preempted_requests_yield_the_same_tokens(models: Path) -> None:
    """Too few blocks for all: requests are thrown out mid-answer, and prefilled again."""

    def preempted(ours: Engine) -> None:
        assert counts[-1] > 0, "the pressure was too low to preempt anyone"

    counts: list[int] = []
    from vllm_specrollout.worker.scheduler import SpecRolloutScheduler

    original = SpecRolloutScheduler._preempt_request

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(counts) + 1)
        return original(self, *args, **kwargs)

    SpecRolloutScheduler._preempt_request = counting
    try:
        check_identity(
            model(models, "qwen3", "bfloat16"),
            "bfloat16",
            _simple(12, seed=2, length=20, max_tokens=120),
            stock={"num_gpu_blocks_override": None},
            inspect=preempted,
            block_size=32,
            num_gpu_blocks_override=24,
            enable_prefix_caching=False,
        )
    finally:
        SpecRolloutScheduler._preempt_request = original


def test_aborted_requests_leave_the_others_alone_and_nothing_behind(models: Path) -> None:
    path = model(models, "qwen3", "float32")
    requests = _simple(12, seed=3, length=12, max_tokens=60)
    with engine(path, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    with engine(path, "float32", is_ours=True) as ours:
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=3)])
        accepted = Accepted(ours)
        llm_engine, finished = ours.llm.llm_engine, {}
        for case in requests:
            llm_engine.add_request(case.problem_id, {"prompt_token_ids": case.prompt}, case.sampling())
        for step in range(400):
            if step == 6:
                llm_engine.abort_request([c.problem_id for c in requests[::3]])
            finished.update({o.request_id: o for o in llm_engine.step() if o.finished})
            if not llm_engine.has_unfinished_requests():
                break
        kept = [i for i in range(len(requests)) if i % 3]
        report = compare(
            [requests[i] for i in kept], [truth[i] for i in kept], [finished[str(i)] for i in kept], "float32"
        )
        assert not report.failures, report.failures
        assert all(accepted.accepted[case.problem_id] for case in requests), "before and after"
        run(ours.llm, requests[:1])  # finished requests are dropped when the next step is scheduled
        assert len(ours.runner.book._entries) <= 1 and ours.runner._planned.num_requests <= 1


def test_rows_that_attend_one_by_one_meet_no_tie_where_attention_rounds_by_their_number(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_attention(where: Any, name: str, value: Any) -> None:
        if name.startswith("cpu_attention"):
            monkeypatch.setattr(where, name, value)

    unlike_rows.spoil(vllm._custom_ops, only_attention)
    path = model(models, "qwen3", "bfloat16")
    requests = _simple(10, seed=21, length=20, max_tokens=40)
    with engine(path, "bfloat16", is_ours=True, spec_rollout={"row_invariant": True}) as ours:
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        assert not stats["rows"]["attention"] and ours.runner.lays_out_chains
        plain = run(ours.llm, requests, enabled=False)
        answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, plain, strict=True)}
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=21)])
        accepted = Accepted(ours)
        drafted = run(ours.llm, requests)
        ours.runner.settle()
        assert accepted.accepted.total() > 50 and ours.runner.stats.branches_committed > 0
    report = compare(requests, plain, drafted, "bfloat16")
    if report.failures and stats["rows"]["linear_from"] != 1:  # on this host products round by their number besides
        report = judged(path, "bfloat16", requests, plain, drafted)
    assert not report.failures, report.failures


def test_lora_adapters_and_the_base_model_mix_in_one_batch(models: Path) -> None:
    from vllm.lora.request import LoRARequest

    path = model(models, "qwen3", "float32")
    adapter = random_adapter(models / "adapter", path)
    requests = _simple(8, seed=4, length=16, max_tokens=40)
    chosen = [LoRARequest("a", 1, adapter) if i % 2 else None for i in range(len(requests))]

    def generate(one: Engine, **options: Any) -> Sequence[Any]:
        prompts = [{"prompt_token_ids": c.prompt} for c in requests]
        params = [c.sampling(**options) for c in requests]
        return one.llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)

    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    with engine(path, "float32", is_ours=False, **settings) as stock:
        truth, base = generate(stock), run(stock.llm, requests)
    assert any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(truth, base, strict=True))
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    with engine(path, "float32", is_ours=True, **settings) as ours:
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=4)])
        report = compare(requests, truth, generate(ours), "float32")
        assert ours.runner.stats.accepted > 0
        _replace_adapter(ours, chosen, generate)
    assert not report.failures, report.failures


def _replace_adapter(ours: Engine, chosen: list[Any], generate: Any) -> None:
    """Other adapters are no new policy; one under an old name is, as trainers of adapters send it."""
    from vllm.lora.request import LoRARequest

    llm, version, path = ours.llm.llm_engine, ours.runner.weights_version, chosen[1].lora_path
    assert llm.add_lora(chosen[1]) and llm.add_lora(LoRARequest("b", 2, path)) and llm.add_lora(chosen[1])
    generate(ours)
    assert version.number == 0
    llm.remove_lora(1)
    assert llm.add_lora(chosen[1])
    generate(ours)
    assert llm.add_lora(LoRARequest("a", 3, path))
    generate(ours)
    assert version.number == version.computed == 2


@pytest.mark.nightly
def test_models_with_two_kinds_of_cache_draft_chains(models: Path) -> None:
    def chains_only(ours: Engine) -> None:
        assert ours.runner.shape[0] is DraftMode.CHAIN
        assert ours.runner.stats.branches_committed == 0

    check_identity(
        _gemma3(models / "gemma3"),
        "float32",
        _simple(8, seed=5, length=40, max_tokens=50),
        inspect=chains_only,
    )


@pytest.mark.nightly
def test_a_larger_block_size_and_scarce_scratch_change_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "MOST_SCRATCH", 5)
    check_identity(
        model(models, "llama", "bfloat16"),
        "bfloat16",
        cases(20, VOCAB, seed=6, max_tokens=30),
        block_size=128,
    )


def test_requests_one_at_a_time_yield_stocks_tokens(models: Path) -> None:
    check_identity(
        model(models, "qwen3", "bfloat16"), "bfloat16", _simple(4, seed=7, length=9, max_tokens=40), max_num_seqs=1
    )


def test_the_ngram_drafter_and_the_auto_budget_yield_stocks_tokens(models: Path) -> None:
    """The way users run it: nothing swapped, nothing fuzzed."""
    path = model(models, "qwen3", "bfloat16")
    requests = cases(29, VOCAB, seed=8, max_tokens=60)
    with engine(path, "bfloat16", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    rounds = []
    with engine(path, "bfloat16", is_ours=True, spec_rollout={"budget": "auto"}) as ours:
        at_a_steady_speed(ours)
        for _ in range(2):
            accepted = Accepted(ours)
            rounds.append(run(ours.llm, requests))
            ours.runner.settle()
            assert accepted.accepted.total() > 20
    for got in rounds:
        report = judged(path, "bfloat16", requests, truth, got)
        assert not report.failures, report.failures


@pytest.mark.identity
def test_long_the_compiled_model_yields_stocks_tokens(models: Path) -> None:
    check_identity(
        model(models, "qwen3", "bfloat16"),
        "bfloat16",
        cases(58, VOCAB, seed=9, max_tokens=40),
        rounds=2,
        enforce_eager=False,
    )


def random_adapter(folder: Path, model_path: str, seed: int = 0) -> str:
    """A rank-4 adapter of all attention projections, large enough to change what is sampled."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(exist_ok=True)
    weights = load_file(str(Path(model_path) / "model.safetensors"))
    torch.manual_seed(seed)
    adapter = {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{stem}.lora_A.weight"] = torch.randn(4, weight.shape[1]) * 0.1
            adapter[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 4) * 0.1
    save_file(adapter, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return str(folder)


def _gemma3(folder: Path) -> str:
    """A random Gemma 3 with sliding and full attention layers in turn, hence two KV cache groups."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from vllm_specrollout.bench.policy.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=32, max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=4,
    )  # fmt: skip
    torch.manual_seed(1)
    net = Gemma3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3.0)  # default weights give almost uniform logits
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
