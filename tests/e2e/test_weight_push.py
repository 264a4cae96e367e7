"""Weights pushed into a running engine as trainers do it, by `model.load_weights`: stock vLLM refuses that on CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file
from vllm_specrollout.bench.policy.random_model import make_random_model

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fuzz import FuzzDrafter
from vllm_specrollout.errors import UnsupportedError

ONLY = ("temperature 1", "greedy", "top_k and top_p", "frequency penalty")
REQUESTS = cases(len(ONLY), VOCAB, seed=5, max_tokens=14, only=ONLY)

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """One set of weights, and what a stock engine answers that began with them."""

    folder: Path
    weights: Weights
    answers: list[list[int]]


def tied_model(folder: Path, seed: int) -> Path:
    """Its output head is its embedding; so trainers have that once, and this checkpoint too."""
    make_random_model(folder, arch="qwen3", size="1M", num_layers=2, seed=seed, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    # else it says its own input again, whatever the weights
    weights["model.embed_tokens.weight"] *= 0.2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", autouse=True)
def packed() -> Iterator[None]:
    """Linear layers without a weight that could be written to, as vLLM leaves them where the CPU has the kernels."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        stock(layer, remove_weight)
        if remove_weight and layer.weight.ndim == 2 and not layer.weight.is_meta:
            own = layer.weight.detach()
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, own, bias)
            layer.weight = torch.nn.Parameter(torch.empty(0, dtype=own.dtype), requires_grad=False)

    stock = utils.dispatch_cpu_unquantized_gemm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch)
        yield


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    """Two sets of weights for one model."""
    top = tmp_path_factory.mktemp("models")
    folders = [tied_model(top / str(seed), seed) for seed in (7, 8)]
    return [Policy(folder, load_file(folder / "model.safetensors"), fresh(folder)) for folder in folders]


@pytest.fixture(scope="module")
def ours(policies: list[Policy]) -> Iterator[Engine]:
    with engine(str(policies[0].folder), "float32", is_ours=True) as one:
        yield one


def fresh(folder: Path) -> list[list[int]]:
    with engine(str(folder), "float32", is_ours=False) as stock:
        return answers(stock)


def answers(one: Engine, **options: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in run(one.llm, REQUESTS, **options)]


def push(one: Engine, new: Weights) -> None:
    """One call per parameter, from a buffer that is used again for the next, as senders do."""
    buffer = torch.empty(max(tensor.numel() for tensor in new.values()), dtype=torch.float32)
    for name, tensor in new.items():
        sent = buffer[: tensor.numel()].view_as(tensor).copy_(tensor)
        one.runner.model.load_weights([(name, sent)])
    buffer.zero_()
    one.llm.reset_prefix_cache()


def reload(one: Engine, folder: Path) -> None:
    one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    one.llm.reset_prefix_cache()


def test_after_a_push_per_parameter_answers_are_those_of_an_engine_that_began_with_these_weights(
    ours: Engine, policies: list[Policy]
) -> None:
    assert policies[0].answers != policies[1].answers
    version, accepted = ours.runner.weights_version.number, 0
    for number in (1, 0, 1):
        policy = policies[number]
        push(ours, policy.weights)
        truth = {case.problem_id: tokens for case, tokens in zip(REQUESTS, policy.answers, strict=True)}
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(truth, VOCAB, seed=number, quality=0.9)])
        assert answers(ours) == answers(ours, enabled=False) == policy.answers
        assert ours.runner.stats.accepted > accepted
        accepted = ours.runner.stats.accepted
    assert ours.runner.weights_version.number == version + 3


def test_vllms_own_reloading_stays_vllms(ours: Engine, policies: list[Policy]) -> None:
    push(ours, policies[1].weights)
    for policy in policies:
        reload(ours, policy.folder)
        assert answers(ours) == policy.answers


def test_what_a_push_does_not_name_keeps_its_weights(ours: Engine, policies: list[Policy], tmp_path: Path) -> None:
    part = {name: one for name, one in policies[1].weights.items() if ".layers.1." in name or "embed_tokens" in name}
    push(ours, policies[0].weights)
    push(ours, part)
    pushed = answers(ours)
    mixed = shutil.copytree(policies[0].folder, tmp_path / "mixed")
    save_file({**policies[0].weights, **part}, mixed / "model.safetensors", {"format": "pt"})
    reload(ours, mixed)
    assert answers(ours) == pushed
    assert pushed not in [policy.answers for policy in policies]


def by_kind(new: Weights) -> Weights:
    """All first kinds of weights of a layer, then all second ones: so every layer is amid its weights for long."""
    return dict(sorted(new.items(), key=lambda item: item[0].rpartition(".layers.")[2].partition(".")[2]))


def in_one_call(one: Engine, new: Weights) -> None:
    """From a buffer that is used again for the next."""
    buffer = torch.empty(max(tensor.numel() for tensor in new.values()), dtype=torch.float32)
    sent = ((name, buffer[: tensor.numel()].view_as(tensor).copy_(tensor)) for name, tensor in new.items())
    one.runner.model.load_weights(sent)
    one.llm.reset_prefix_cache()


@pytest.mark.parametrize("order", [dict, by_kind], ids=["by layer", "by kind"])
@pytest.mark.parametrize("send", [push, in_one_call], ids=["a call per parameter", "one call"])
def test_a_push_goes_over_a_part_of_another_that_no_step_computed_with(
    ours: Engine, policies: list[Policy], send: Any, order: Any
) -> None:
    new, old = policies[1], policies[0]
    push(ours, old.weights)
    assert answers(ours) == old.answers
    version = ours.runner.weights_version.number
    # it begins with a layer that the one before did not name, and then comes to one that is packed already
    push(ours, {name: one for name, one in old.weights.items() if ".layers.1." in name})
    layers = {name: one for name, one in new.weights.items() if ".layers." in name}
    send(ours, {**order(layers), **new.weights})
    assert answers(ours) == new.answers
    assert ours.runner.weights_version.number == version + 1


def test_a_part_of_a_packed_layer_is_refused_before_a_token_is_made_of_it(ours: Engine, policies: list[Policy]) -> None:
    push(ours, {name: one for name, one in policies[0].weights.items() if "layers.0.self_attn.q_proj" in name})
    with pytest.raises(UnsupportedError, match=r"`model.layers.0.self_attn.qkv_proj` got \d+ of its \d+ weights"):
        ours.runner.weights_version.close()
    # a whole push mends it
    push(ours, policies[0].weights)
    assert answers(ours) == policies[0].answers
