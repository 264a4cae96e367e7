"""Weights are exchanged whole, between two steps, or not at all, whatever becomes of their files and of who asked."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from tests.unit.budgets.builders import chains, verified
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.observe.heads import POSITIONS, Heads
from vllm_specrollout.worker.models import swapping
from vllm_specrollout.worker.models.swapping import HeadLoad, Swapper, Twin

WIDTH, SOURCE = 4, 1


class Stacked(torch.nn.Module):
    """Two products in one parameter, as vLLM has them; what runs is made of it once it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * WIDTH, WIDTH), requires_grad=False)
        self.weight.weight_loader = self.load
        self.made = ""

    def load(self, param: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
        param.data[shard * WIDTH : (shard + 1) * WIDTH].copy_(loaded)


class Head(torch.nn.Module):
    """A drafting model over modules of its target."""

    def __init__(self, target: torch.nn.Module) -> None:
        super().__init__()
        self.embed = target.embed
        self.products = Stacked()
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.norm.requires_grad_(False)
        self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.norm.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, weight in weights:
            if name.startswith("products."):
                own["products.weight"].weight_loader(own["products.weight"], weight, "ab".index(name[-1]))
                self.products.made = f"of {weight[0, 0]:.0f}"
            else:
                loader = getattr(own[name], "weight_loader", lambda param, loaded: param.data.copy_(loaded))
                loader(own[name], weight)


class Drafter:
    """In the place of a model drafter."""

    num_sources, name, source = 2, "model", SOURCE

    def __init__(self, model: Head, folder: Path) -> None:
        given = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(folder), dtype=torch.float32))
        config = SimpleNamespace(
            speculative_config=given, model_config=SimpleNamespace(get_vocab_size=lambda: 10), parallel_config=None
        )
        self.of_vllm, self.heads, self.renewed = SimpleNamespace(model=model, vllm_config=config), Heads(SOURCE), 0

    def renew(self) -> None:
        self.renewed += 1


def checkpoint(folder: Path, value: float, **others: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    weights = {f"products.{part}": torch.full((WIDTH, WIDTH), value) for part in "ab"}
    save_file({**weights, "norm.weight": torch.full((WIDTH,), value), **others}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": WIDTH}))
    return folder


class Engine:
    """A runner, and what serves in it; weights of a value lie in a folder of its name."""

    def __init__(self, root: Path) -> None:
        self.root, self.target = root, torch.nn.Module()
        self.target.embed = torch.nn.Embedding(10, WIDTH).requires_grad_(False)
        self.head = Head(self.target)
        record_metadata_for_reloading(self.head)
        self.drafter, self.dropped = Drafter(self.head, root / "1.0"), []
        nothing = SimpleNamespace(renew=lambda name: None, renewed=lambda *sources: None)
        told = SimpleNamespace(drop=lambda *what: self.dropped.append(what), renewed=lambda drafter: None)
        told.worth = told.budget = nothing
        self.runner = SimpleNamespace(
            model_drafter=self.drafter, device=torch.device("cpu"), get_model=lambda: self.target, spec_rollout=told,
            drafting=SimpleNamespace(is_apart=False), metrics=SimpleNamespace(head=lambda *numbers: None),
        )  # fmt: skip
        self.swapper = Swapper(self.runner)
        self.load(1.0)
        self.swapper.begin_step(self.swapper.verdict)
        self.first = self.pointers()

    def begin(self, name: str, value: float) -> None:
        self.swapper.begin(name, checkpoint(self.root / str(value), value))
        self.wait()

    def load(self, value: float) -> None:
        self.begin("a", value)
        self.swapper.end("a", is_taken=True)

    def wait(self) -> None:
        _, load = self.swapper._load
        load.thread.join(20)

    def pointers(self) -> list[Any]:
        return [self.head.products.weight, self.head.norm.weight, self.head.tied.weight]

    @property
    def values(self) -> set[float]:
        """Of all its weights, and of what was made of them: of a whole head there is one."""
        assert self.head.norm.weight is self.head.tied.weight and self.pointers() == self.first
        weights = {
            value for one in self.head.parameters() if one.shape[-1] == WIDTH for value in one.flatten().tolist()
        }
        weights -= set(self.target.embed.weight.flatten().tolist())
        return weights | {float(self.head.products.made.removeprefix("of "))}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def met(heads: Heads, share: float, positions: int = 3000) -> None:
    """A request's drafts of one token are met so often."""
    heads.admit("r0")
    for i in range(positions):
        heads.observe(chains(1, 1, source=SOURCE), verified(chains(1, 1), [int(i % 10 < 10 * share)]))


def test_until_they_are_exchanged_the_old_weights_serve(engine: Engine) -> None:
    embedding = engine.target.embed.weight.clone()
    engine.begin("a", 2.0)
    assert engine.swapper.is_ready("a") and engine.values == {1.0}
    assert engine.swapper.end("a", is_taken=True) == {"tensors": 3, "version": 2}
    assert engine.values == {2.0} and torch.equal(engine.target.embed.weight, embedding)


def test_one_that_is_not_taken_leaves_no_trace(engine: Engine) -> None:
    engine.begin("a", 2.0)
    renewed = engine.drafter.renewed
    assert engine.swapper.end("a", is_taken=False) == {}
    assert engine.values == {1.0} and engine.drafter.renewed == renewed and engine.drafter.heads.number == 1
    with pytest.raises(ConfigError, match="were dropped"):
        engine.swapper.end("a", is_taken=True)


def test_who_comes_later_takes_the_place_of_who_came_first(engine: Engine) -> None:
    for name, value in (("a", 2.0), ("b", 3.0)):
        engine.swapper.begin(name, checkpoint(engine.root / str(value), value))
    for call in (engine.swapper.is_ready, lambda name: engine.swapper.end(name, is_taken=True)):
        with pytest.raises(ConfigError, match="others were loaded meanwhile"):
            call("a")
    engine.wait()
    engine.swapper.end("b", is_taken=True)
    assert engine.values == {3.0}


def test_a_worse_head_goes_and_the_old_tensors_come_back_though_their_file_is_gone(engine: Engine, caplog: Any) -> None:
    heads = engine.drafter.heads
    met(heads, 0.8)
    engine.load(2.0)
    for value in ("1.0", "2.0"):
        shutil.rmtree(engine.root / value)
    met(heads, 0.2, POSITIONS)
    assert engine.swapper.verdict == (2, False) and engine.values == {2.0}
    engine.swapper.begin_step(None)
    engine.swapper.begin_step((1, False))
    assert engine.values == {2.0}, "another head was judged"
    for _ in range(2):
        # a scheduler may have said it twice by now
        engine.swapper.begin_step((2, False))
        assert engine.values == {1.0} and (heads.number, heads.went_back) == (1, 1)
    assert "its first choices were met 0.2" in caplog.text and "before 0.800" in caplog.text


def test_a_head_that_stays_lets_go_of_the_one_before(engine: Engine) -> None:
    met(engine.drafter.heads, 0.8)
    engine.load(2.0)
    met(engine.drafter.heads, 0.8, POSITIONS)
    engine.swapper.begin_step(engine.swapper.verdict)
    assert engine.values == {2.0} and engine.swapper._before is None and engine.drafter.heads.went_back == 0


def test_an_engine_that_sleeps_keeps_no_second_head_and_wakes_with_the_one_that_served(engine: Engine) -> None:
    met(engine.drafter.heads, 0.8)
    engine.load(2.0)
    engine.begin("b", 1.0)
    engine.swapper.rest()
    assert engine.swapper._before is engine.swapper._load is None and not engine.drafter.heads.is_on_probation
    engine.head.products.weight.data.zero_()
    engine.swapper.again()
    assert engine.values == {2.0} and engine.drafter.heads.number == 2


def test_after_going_back_a_sleep_brings_the_head_that_serves(engine: Engine) -> None:
    met(engine.drafter.heads, 0.8)
    engine.load(2.0)
    engine.swapper.begin_step((2, False))
    engine.head.products.weight.data.zero_()
    engine.swapper.again()
    assert engine.values == {1.0}


def test_where_each_rank_has_a_scheduler_nothing_is_kept(engine: Engine) -> None:
    engine.runner.drafting.is_apart = True
    met(engine.drafter.heads, 0.8)
    engine.load(2.0)
    assert engine.swapper._before is None and not engine.drafter.heads.is_on_probation


def test_a_drafter_that_was_given_up_meanwhile_gets_no_weights(engine: Engine) -> None:
    engine.begin("a", 2.0)
    engine.runner.model_drafter = None
    with pytest.raises(ConfigError, match="no model drafts in this engine any more"):
        engine.swapper.end("a", is_taken=True)
    assert engine.values == {1.0}


@pytest.mark.parametrize("goes_back", [False, True])
def test_half_an_exchange_is_no_drafter_and_no_step_fails_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, goes_back: bool
) -> None:
    def fails(twin: Twin) -> None:
        raise RuntimeError("the device is lost")

    if goes_back:
        engine.load(2.0)
    monkeypatch.setattr(Twin, "exchange", fails)
    if goes_back:
        engine.swapper.begin_step((2, False))
    else:
        with pytest.raises(ConfigError, match="the device is lost"):
            engine.load(2.0)
    assert engine.runner.model_drafter is None and [drafter for drafter, _ in engine.dropped] == [engine.drafter]


def test_ranks_that_do_not_judge_go_back_with_the_one_that_does(engine: Engine, caplog: Any) -> None:
    engine.load(2.0)
    engine.swapper.begin_step((2, False))
    assert engine.values == {1.0} and engine.drafter.heads.number == 1
    assert "is worse" not in caplog.text, "it is told once"


def test_the_thread_takes_one_core_at_low_priority_and_the_steps_theirs(engine: Engine) -> None:
    found: list[tuple[int, int]] = []
    stock = HeadLoad.run

    def run(load: HeadLoad) -> None:
        found.append((torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        stock(load)

    before = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadLoad, "run", run)
        engine.load(2.0)
    assert found == [(1, max(swapping.NICE, before[1]))]
    assert before == (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))


def broken(folder: Path, rng: random.Random) -> None:
    """What a trainer's end, a full disk, a hole or a diverged run leaves behind."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    match rng.randrange(6):
        case 0:
            file.write_bytes(content[: rng.randrange(len(content))])
        case 1:
            file.write_bytes(content[:begin] + bytes(len(content) - begin))
        case 2:
            checkpoint(folder, float("nan"))
        case 3:
            file.unlink()
        case 4:
            checkpoint(folder, 9.0, more=torch.zeros(1))
        case 5:
            (folder / "config.json").write_text("{")


@pytest.mark.parametrize("seed", range(50))
def test_whatever_ends_when_exactly_one_whole_head_serves(engine: Engine, tmp_path: Path, seed: int) -> None:
    """Whoever asked may be gone after any call, files may break at any time, and verdicts may come late."""
    rng, serves, before = random.Random(seed), 1.0, None
    for number in range(12):
        value = float(rng.randrange(2, 9))
        folder = checkpoint(tmp_path / f"head {number}", value)
        if is_broken := rng.random() < 0.4:
            broken(folder, rng)
        met(engine.drafter.heads, 0.8, 20)
        engine.swapper.begin(str(number), folder)
        engine.wait()
        assert engine.values == {serves}
        if rng.random() < 0.3:
            continue
        try:
            engine.swapper.end(str(number), is_taken=rng.random() < 0.8)
        except ConfigError:
            assert is_broken
        if engine.swapper._place is not None and engine.swapper._place[0] == folder:
            assert not is_broken
            serves, before = value, serves
        if rng.random() < 0.4 and engine.swapper._before is not None:
            engine.swapper.begin_step((engine.drafter.heads.number, False))
            assert before is not None
            serves = before
        assert engine.values == {serves} and engine.runner.model_drafter is engine.drafter
