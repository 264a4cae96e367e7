"""Other weights for a drafter while requests run: the tokens stay, and the drafter is right, as it was, or off."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

import vllm_specrollout
from tests.e2e.drafting_models import copied, eagle3_head, eagle_head
from tests.e2e.identity.engines import Engine, engine, model
from tests.unit.budgets.builders import chains
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.types import VerifyResult

OWN = {"drafters": [], "budget": "fixed", "max_draft_tokens": 8, "max_depth": 4}
PROMPTS = [{"prompt_token_ids": [7 + i, 30, 31 + i]} for i in range(6)]
PARAMS = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=60, ignore_eos=True) for i in range(6)]
_FILE = "model.safetensors"
BAD = 1e-3  # so small matrices are no zeros, and draft as badly


def plain_tokens(target: str) -> list[list[int]]:
    with engine(target, "float32", is_ours=False) as stock:
        return [list(out.outputs[0].token_ids) for out in stock.llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def tokens_with_swaps(ours: Engine, paths: list[str]) -> tuple[list[list[int]], int]:
    """The requests' tokens, with a swap after each step; and how many swaps there were."""
    core, found, swaps = ours.llm.llm_engine, {}, 0
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        core.add_request(str(i), prompt, params.clone())
    while core.has_unfinished_requests():
        for out in core.step():
            if out.finished:
                found[out.request_id] = list(out.outputs[0].token_ids)
        version = vllm_specrollout.load_drafter(ours.llm, paths[swaps % len(paths)])
        swaps += 1
        assert version == swaps
    return [found[str(i)] for i in range(len(PROMPTS))], swaps


def started(target: str, method: str, path: str) -> Any:
    given = {"method": method, "model": path, "num_speculative_tokens": 4}
    return engine(target, "float32", is_ours=True, spec_rollout={**OWN, "speculative_config": given})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(eagle_head, id="eagle"),
        pytest.param(eagle3_head, id="eagle3", marks=pytest.mark.nightly),
        pytest.param(None, id="draft_model", marks=pytest.mark.nightly),
    ],
)
def test_swaps_between_all_steps_change_no_token(models: Path, tmp_path: Path, make: Any) -> None:
    target = model(models, "llama", "float32")
    first = make(target, tmp_path / "first") if make else copied(target, tmp_path / "first", lambda weight: weight)
    second = copied(first, tmp_path / "second", lambda weight: weight * 1.5 + 0.01)
    method = make.__name__.removesuffix("_head") if make else "draft_model"
    with started(target, method, first) as ours:
        tokens, swaps = tokens_with_swaps(ours, [second, first])
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert tokens == plain_tokens(target)
    assert swaps > 10 and stats["accepted"] > 0


def test_a_swapped_drafter_drafts_with_its_new_weights(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    useless = copied(target, tmp_path / "useless", lambda weight: weight.flip(0) * BAD)
    params = [SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)]
    with started(target, "draft_model", useless) as ours:
        found = []
        # the target itself: each of its drafts is met
        for i, path in enumerate((None, target, useless, target)):
            if path is not None:
                assert vllm_specrollout.load_drafter(ours.llm, path) == i
            ours.llm.reset_prefix_cache()
            ours.llm.generate(PROMPTS[:1], params, use_tqdm=False)
            (stats,) = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
            found.append((stats["accepted"], stats["steps"]))
    assert found[0][0] < 10 and found[2][0] < 10
    assert found[1] == found[3] == (20, 6)


def test_a_drafter_written_off_before_a_swap_is_half_believed_after_it(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    useless = copied(target, tmp_path / "useless", lambda weight: torch.zeros_like(weight))
    with started(target, "draft_model", useless) as ours:
        drafter, runner = ours.runner.model_drafter, ours.runner
        budget = GoodputBudget(8, 4)
        wrong = chains(1, 4, 0.75, source=drafter.source)
        for _ in range(200):
            budget.acceptance.count(wrong, VerifyResult(np.zeros(1, np.int32), np.zeros(0, np.int32)))
        runner.spec_rollout.budget = budget
        assert budget.acceptance.calibration()[drafter.source, 7] < 0.2
        vllm_specrollout.load_drafter(ours.llm, target)
        assert budget.acceptance.calibration()[drafter.source, 7] == pytest.approx(0.5, abs=0.01)
        assert np.delete(budget.acceptance.calibration(), drafter.source, axis=0).min() == 1.0


NOT_FLOATING = {
    "I8": torch.int8,
    "U16": torch.uint16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "C64": torch.complex64,
}


def _without_data(content: bytes) -> bytes:
    """What a copy in progress, a crash or a sparse file leaves behind a right header."""
    begin = 8 + int.from_bytes(content[:8], "little")
    return content[:begin] + bytes(len(content) - begin)


def _changed(head: Path, name: str, change: Any = lambda weights: None) -> Path:
    """A copy of the head beside it, whose weights were changed."""
    folder = head.parent / name
    shutil.copytree(head, folder)
    weights = load_file(folder / _FILE)
    change(weights)
    save_file(weights, folder / _FILE)
    return folder


def _broken(head: Path) -> dict[str, Path]:
    """Files that are no weights: what is said of each -> its folder."""
    empty, cut, holes = head.parent / "empty", _changed(head, "cut"), _changed(head, "holes")
    empty.mkdir()
    (cut / _FILE).write_bytes((cut / _FILE).read_bytes()[:200])
    (holes / _FILE).write_bytes(_without_data((holes / _FILE).read_bytes()))
    deep, two = _changed(head, "deep"), _changed(head, "two")
    (deep / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    about = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps({**about, "num_hidden_layers": 2}))
    return {
        "holds no safetensors": empty,
        "cannot be read": cut,
        "fc.weight is all zeros; .* is all": holes,
        r"`config\.json` is not JSON that can be read": deep,
        "another kind of drafter: num_hidden_layers is 2, was 1": two,
    }


def _unfit(head: Path) -> dict[str, Path]:
    """Weights of others, and weights that are none: what is said of each -> its folder."""
    changed = functools.partial(_changed, head)

    def like(name: str, change: Any) -> Path:
        return changed(name, lambda weights: weights.update({one: change(weight) for one, weight in weights.items()}))

    def all_of(value: float) -> Any:
        return lambda weight: torch.full_like(weight, value)

    return {
        "missing: fc.weight": changed("less", lambda weights: weights.pop("fc.weight")),
        "unknown: more": changed("more", lambda weights: weights.update(more=torch.zeros(1))),
        r"shape: fc.weight is \(1, 1\)": changed(
            "shape", lambda weights: weights.update({"fc.weight": torch.zeros(1, 1)})
        ),
        **{
            f"dtype: fc.weight is {name}": like(name, lambda weight, dtype=dtype: weight.to(dtype))
            for name, dtype in NOT_FLOATING.items()
        },
        "fc.weight has values that are not finite": like("nan", all_of(math.nan)),
        "norm.weight has values that are not finite": like(
            "infinite", lambda weight: weight if weight.ndim > 1 else weight * math.inf
        ),
        "fc.weight is all zeros; layers.0": like("zeros", all_of(0.0)),
        "brings an output head": changed(
            "own", lambda weights: weights.update({"lm_head.weight": torch.zeros(400, 128)})
        ),
    }


def test_what_does_not_fit_is_refused_and_the_drafter_goes_on_as_it_was(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    head = eagle_head(target, tmp_path / "head")
    with started(target, "eagle", head) as ours:
        drafter = ours.runner.model_drafter
        for told, path in {**_broken(Path(head)), **_unfit(Path(head))}.items():
            with pytest.raises(ConfigError, match=told):
                vllm_specrollout.load_drafter(ours.llm, path)
        assert ours.runner.model_drafter is drafter and drafter.heads.number == 0
        outputs = ours.llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain_tokens(target) and stats["accepted"] > 0


def test_a_head_with_an_output_head_of_its_own_may_not_leave_it_out(models: Path, tmp_path: Path) -> None:
    """The old one would stay, and nobody would know."""
    target = model(models, "llama", "float32")
    head = eagle3_head(target, tmp_path / "head")
    less = tmp_path / "less"
    shutil.copytree(head, less)
    weights = load_file(less / _FILE)
    del weights["lm_head.weight"]
    save_file(weights, less / _FILE)
    with (
        started(target, "eagle3", head) as ours,
        pytest.raises(ConfigError, match="does not fit the drafter that runs; missing: lm_head.weight"),
    ):
        vllm_specrollout.load_drafter(ours.llm, less)


def test_weights_that_fail_half_way_leave_the_drafter_as_it_was(models: Path, tmp_path: Path, monkeypatch: Any) -> None:
    target = model(models, "llama", "float32")
    head = eagle_head(target, tmp_path / "head")
    with started(target, "eagle", head) as ours:
        drafter = ours.runner.model_drafter

        def fails(weights: Any) -> None:
            next(weights)
            raise RuntimeError("no memory left")

        monkeypatch.setattr(ours.runner.model_drafter.proposer.of_vllm.model, "load_weights", fails)
        with pytest.raises(ConfigError, match="could not be loaded: RuntimeError: no memory left"):
            vllm_specrollout.load_drafter(ours.llm, head)
        assert ours.runner.model_drafter is drafter and drafter.heads.number == 0
        outputs = ours.llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain_tokens(target) and stats["accepted"] > 0


def test_an_engine_without_a_model_that_drafts_refuses(models: Path) -> None:
    target = model(models, "llama", "float32")
    with (
        engine(target, "float32", is_ours=True) as ours,
        pytest.raises(UnsupportedError, match="no model drafts in this engine"),
    ):
        vllm_specrollout.load_drafter(ours.llm, target)


def test_a_head_that_drafts_badly_goes_back_amid_requests_and_the_tokens_are_stocks(
    models: Path, tmp_path: Path, caplog: Any
) -> None:
    """It passes all checks of its file. Which head serves, and that it went back, is told."""
    target = model(models, "llama", "float32")
    first = copied(target, tmp_path / "first", lambda weight: weight)
    bad = copied(target, tmp_path / "bad", lambda weight: weight.flip(0) * BAD)
    prompts = [{"prompt_token_ids": [7 + i, 30, 31 + i]} for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine(target, "float32", is_ours=False) as stock:
        plain = [list(out.outputs[0].token_ids) for out in stock.llm.generate(prompts, params, use_tqdm=False)]
    with started(target, "draft_model", first) as ours:
        heads, found = ours.runner.model_drafter.heads, []

        def rollout() -> None:
            outputs = ours.llm.generate(prompts, params, use_tqdm=False)
            found.append([list(out.outputs[0].token_ids) for out in outputs])

        rollout()
        (first_stats,) = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
        assert vllm_specrollout.load_drafter(ours.llm, bad) == 1 and heads.is_on_probation
        ours.llm.reset_prefix_cache()
        rollout()
        told = vllm_specrollout.read_drafters(ours.llm)["engines"][0]["drafters"]["model"]["head"]
        (amid,) = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
        ours.llm.reset_prefix_cache()
        rollout()
        (after,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert found == [plain] * 3
    assert (told["number"], told["parent"], told["went_back"], told["is_on_probation"]) == (0, -1, 1, False)
    assert after["accepted"] == first_stats["accepted"] > amid["accepted"] > 0, "the good one drafts again"
    assert "head 1 is worse than head 0, and goes" in caplog.text
