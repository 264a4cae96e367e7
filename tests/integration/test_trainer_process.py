"""A trainer in a process of its own: it learns, halts, publishes, goes back, and outlives kills, full disks and NaN."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

import torch
from safetensors.torch import load_file

from tests.unit.training.targets import Prefilled, counting, make_target
from vllm_specrollout.training import process
from vllm_specrollout.training.heads import UNTRAINED, layers_of
from vllm_specrollout.training.learner import HeadJudgement
from vllm_specrollout.training.parent import Duty, TrainerProcess, Wish, numbers_in
from vllm_specrollout.training.process import STATE, Trainer, make_head
from vllm_specrollout.training.rows import Rows, RowSink, RowsPart

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def untrained(target: Path) -> Path:
    make_head(target, target / "heads" / "0")
    return target / "heads" / "0"


@pytest.fixture(scope="module")
def answers(target: Path) -> list[Rows]:
    return list(Prefilled()(target, layers_of(2), counting(200)))


def duty_of(target: Path, head: Path, folder: Path, **given: Any) -> Duty:
    return Duty(**{"target": str(target), "dir": str(folder), "head": str(head), "is_new": True, "num_levels": 2,
                   "judge_rows": 2048, **given})  # fmt: skip


def send(sink: RowSink, rows: Rows, name: str) -> bool:
    part = RowsPart(name, 0, len(rows), len(rows), rows.prompt_tokens, rows.version)
    return sink.send([part], rows.token_ids.numpy(), rows.hidden)


class Fed:
    """A trainer's process and the engine that feeds it."""

    def __init__(self, duty: Duty, answers: list[Rows]) -> None:
        self.process = TrainerProcess(duty)
        self.sink, self._left, self._count = RowSink(self.process.duty.rows), list(answers), 0

    def give(self, answers: list[Rows]) -> None:
        self._left += answers

    def until(self, what: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            said = self.process.hear()
            if what(said):
                return said
            if said.wants_rows and self._left and send(self.sink, self._left[0], f"rows-{self._count}"):
                self._left.pop(0)
                self._count += 1
            time.sleep(0.01)
        raise AssertionError(f"it only said {self.process.said}")


@contextlib.contextmanager
def fed(duty: Duty, answers: list[Rows]) -> Iterator[Fed]:
    own = Fed(duty, answers)
    try:
        yield own
    finally:
        own.process.stop()
        own.sink.close()


def test_it_learns_halts_publishes_ends_and_goes_on_after_a_kill(target, untrained, answers, tmp_path) -> None:
    with fed(duty_of(target, untrained, tmp_path), answers[:80]) as own:
        own.process.tell(is_halted=False, learning=1)
        said = own.until(lambda said: said.own > 0.0)
        assert said.own > said.serving > 0.0 and said.step_s > 0.0
        # halted within a step
        own.process.tell(is_halted=True)
        steps = own.until(lambda said: said.halts == 1).steps
        time.sleep(0.5)
        assert own.process.hear().steps == steps
        # published whole, under the number that was wished for
        own.process.tell(publish=7)
        said = own.until(lambda said: said.published == 7)
        assert said.own == 0.0 and numbers_in(tmp_path) == [7] and not (tmp_path / "7" / UNTRAINED).exists()
        old, new = (load_file(folder / "model.safetensors") for folder in (untrained, tmp_path / "7"))
        assert old.keys() == new.keys() and any(not torch.equal(old[name], new[name]) for name in old)
        configs = [json.loads((folder / "config.json").read_text()) for folder in (untrained, tmp_path / "7")]
        assert configs[0] == configs[1], "an engine refuses other configurations"
        own.process.serves(tmp_path / "7")
        # killed, it goes on from its last state, and its parent's numbers hold
        own.until(lambda said: (tmp_path / STATE).exists())
        saved = torch.load(tmp_path / STATE, weights_only=True)["learner"]["rows"]
        os.kill(own.process.pid, signal.SIGKILL)
        own.process.tell(is_halted=False)
        own.give(answers[80:])
        said = own.until(lambda said: said.rows > saved + 256)
        assert said.published == 7 and own.process.pid is not None


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_fifty_random_kills_cost_the_trainer_an_interval_each_and_no_head(target, untrained, answers, tmp_path) -> None:
    """At any moment: while it starts, learns, judges or writes."""
    rng = random.Random(3)
    with fed(duty_of(target, untrained, tmp_path), list(answers)) as own:
        for kill in range(50):
            own.give(list(Prefilled()(target, layers_of(2), counting(40, 40 + kill % 20, 40 * (kill // 20)))))
            own.process.tell(is_halted=False, learning=own.process.said.ended + 1)
            if kill % 5:  # it gets on; else it is killed on its way there
                steps = own.process.said.steps
                own.until(lambda said, steps=steps: own.process._process.restarts == 0 and said.steps != steps)
            if kill % 10 == 9 and own.process.said.own > 0.0:
                own.process.tell(publish=own.process.said.published + 1)
            time.sleep(rng.uniform(0.0, 0.4))
            killed = own.process.pid
            os.kill(killed, signal.SIGKILL)
            own.until(lambda said, killed=killed: own.process.pid not in (None, killed))
        own.give(list(answers))
        own.process.tell(is_halted=False, learning=own.process.said.ended + 1)
        said = own.until(lambda said: own.process._process.restarts == 0 and said.own > 0.0)
        assert said.own > said.serving, "what it had learned by its judgements was kept"
        own.process.tell(publish=said.published + 1)
        own.until(lambda now: now.published == said.published + 1)
        names = load_file(untrained / "model.safetensors").keys()
        heads = [load_file(tmp_path / str(one) / "model.safetensors") for one in numbers_in(tmp_path)]
        assert heads and all(head.keys() == names for head in heads)
        assert all(bool(one.isfinite().all()) for head in heads for one in head.values() if one.is_floating_point())


# --- in this process: what fails costs an interval --------------------------------------------------------------------


@pytest.fixture
def trainer(target: Path, untrained: Path, tmp_path: Path, answers: list[Rows]) -> Iterator[Trainer]:
    duty = duty_of(target, untrained, tmp_path, control=f"ipc://{tmp_path}/c", rows=f"ipc://{tmp_path}/r")
    with opened(duty, answers) as own:
        yield own


@contextlib.contextmanager
def opened(duty: Duty, answers: list[Rows]) -> Iterator[Trainer]:
    own = Trainer(duty)
    own.wish = Wish(is_halted=False, learning=own.said.ended + 1)
    for one in answers:
        own.learner.add(one)
    try:
        yield own
    finally:
        if own._writing is not None:
            own._writing.join()
        if own.source is not None:
            own.source.close()


def turned(own: Trainer, until: Callable[[], bool]) -> None:
    for _ in range(400):
        own.turn()
        if until():
            return
    raise AssertionError(f"it only said {own.said}")


def worth(*accepted: float) -> Iterator[HeadJudgement]:
    yield from (HeadJudgement((one, 0.0), 1.0, 100) for one in accepted)


def test_two_judgements_in_vain_end_learning_with_the_best_head(trainer: Trainer, monkeypatch: Any) -> None:
    # its own, of what serves; then its own alone
    found = worth(1.0, 0.5, 1.2, 1.1, 1.2)
    monkeypatch.setattr(trainer.learner, "judge", lambda goes_on: next(found))
    turned(trainer, lambda: trainer.said.own == 1.2)
    best = trainer._copy()
    turned(trainer, lambda: trainer.said.ended == 1)
    assert (trainer.said.own, trainer.said.serving) == (1.2, 0.5)
    assert all(torch.equal(one, best[name]) for name, one in trainer._copy().items())
    steps = trainer.learner.steps
    trainer.turn()
    assert trainer.learner.steps == steps and trainer.source is None and not trainer.said.wants_rows


def test_a_head_that_an_engine_found_worse_is_dropped_and_its_parent_goes_on(trainer: Trainer) -> None:
    first = trainer._copy()
    turned(trainer, lambda: trainer.said.own > 0.0)
    trainer.wish = Wish(is_halted=False, learning=1, publish=1)
    trainer.turn()
    trainer.wish = Wish(is_halted=True, learning=1, publish=1, backs=1)
    trainer.turn()
    assert trainer.said.ended == 1 and trainer.said.own == 0.0
    assert all(torch.equal(one, first[name]) for name, one in trainer._copy().items())


def test_a_judgement_is_given_up_when_the_trainer_is_halted(trainer: Trainer, monkeypatch: Any) -> None:
    turned(trainer, lambda: trainer.learner.rows - trainer._judged_at >= 1024)
    monkeypatch.setattr(trainer, "_hear", lambda timeout_ms: setattr(trainer, "wish", Wish(is_halted=True, learning=1)))
    judged = trainer._judged_at
    trainer._judge()
    assert trainer._judged_at == judged and trainer.said.own == 0.0


def test_rows_and_losses_that_are_no_numbers_change_no_weight(trainer: Trainer, answers: list[Rows]) -> None:
    bad = Rows(answers[0].token_ids + 1, 3, 0, torch.full_like(answers[0].hidden, float("nan")))
    trainer.turn()
    count, sink = len(trainer.learner.windows.held_out()), RowSink(f"ipc://{trainer._dir}/r")
    while not send(sink, bad, "bad"):
        time.sleep(0.01)
    time.sleep(0.2)
    trainer.turn()
    sink.close()
    assert len(trainer.learner.windows.held_out()) == count
    before, loss_on = trainer._copy(), trainer.learner._loss_on
    trainer.learner._loss_on = lambda windows: loss_on(windows) * float("nan")  # type: ignore[method-assign]
    trainer.turn()
    assert "is no number" in trainer.said.error
    assert all(torch.equal(one, before[name]) for name, one in trainer._copy().items())


def test_a_full_disk_is_said_and_the_next_head_is_written(trainer: Trainer, monkeypatch: Any) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    saved = process.save_head
    monkeypatch.setattr(process, "save_head", full)
    monkeypatch.setattr(torch, "save", full)
    turned(trainer, lambda: trainer.said.own > 0.0)
    assert trainer._writing is not None
    trainer._writing.join()
    assert "state could not be written: [Errno 28]" in trainer.said.error
    own, weights = trainer.said.own, trainer._copy()
    trainer.wish = Wish(is_halted=True, learning=1, publish=1)
    trainer.turn()
    assert trainer.said.failed == 1 and "head 1 could not be written" in trainer.said.error
    assert trainer.said.own == own and all(torch.equal(one, weights[name]) for name, one in trainer._copy().items())
    monkeypatch.setattr(process, "save_head", saved)
    trainer.wish = Wish(is_halted=True, learning=1, publish=2)
    trainer.turn()
    assert trainer.said.published == 2 and numbers_in(trainer._dir) == [2]


@pytest.mark.parametrize("lives", [10, pytest.param(50, marks=pytest.mark.nightly)])
def test_lives_that_end_anywhere_lose_no_more_than_intervals(target, untrained, answers, tmp_path, lives: int) -> None:
    """As fast as the learner goes: each life is given up somewhere, and the next one goes on."""
    draws, rows, written = np.random.default_rng(0), 0, 0
    duty = duty_of(
        target, untrained, tmp_path, judge_rows=512, control=f"ipc://{tmp_path}/c", rows=f"ipc://{tmp_path}/r"
    )
    for life in range(lives):
        with opened(duty, answers[4 * life : 4 * life + 4]) as own:
            assert own.learner.rows == rows, "what was saved last"
            for _ in range(int(draws.integers(1, 12))):
                own.turn()
                own.wish = Wish(is_halted=False, learning=own.said.ended + 1, publish=1 + life // 2)
            written = max(written, own.said.published)
        if (tmp_path / STATE).exists():
            rows = torch.load(tmp_path / STATE, weights_only=True)["learner"]["rows"]
    assert rows > 40 * lives and written > lives // 8
    assert max(numbers_in(tmp_path)) == written and not list(tmp_path.glob(".*")), "no half-written head is left"
