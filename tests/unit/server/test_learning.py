from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from vllm_specrollout.config import parse
from vllm_specrollout.server import learning as loop
from vllm_specrollout.server.asking import Call
from vllm_specrollout.server.learning import HeadLearning
from vllm_specrollout.training import parent, spot
from vllm_specrollout.training.parent import Duty, Said, Wish


class FakeTrainer:
    """In the place of a process: it remembers what is wished, and says what a test says."""

    made: list[FakeTrainer] = []

    def __init__(self, duty: Duty) -> None:
        self.duty, self.wish, self.said, self.error, self.pid = duty, duty.done, Said(), "", 1
        self.served: list[str] = []
        FakeTrainer.made.append(self)

    def tell(self, **changed: Any) -> None:
        self.wish = msgspec.structs.replace(self.wish, **changed)

    def hear(self) -> Said:
        return self.said

    def says(self, **changed: Any) -> None:
        self.said = msgspec.structs.replace(self.said, **changed)

    def serves(self, head: Path) -> None:
        self.served.append(head.name)

    def give_up(self, why: str) -> None:
        self.error = why

    def stop(self) -> None:
        self.error = "stopped"


class FakeEngine:
    """Answers a beat's calls."""

    def __init__(self, folder: Path, devices: tuple[str, ...] = ()) -> None:
        given = {"method": "eagle3", "model": str(folder / "0"), "num_speculative_tokens": 10}
        train = {"mode": "auto", "dir": str(folder), "devices": list(devices)}
        config = parse({"train": train, "speculative_config": given})
        assert config is not None
        self.now, self.calls = 0.0, list[Call]()
        self.head = {"positions": 0, "met": 0, "went_back": 0}
        self.head |= {"is_trained": False, "is_asleep": False, "is_lent": False}
        self.learning = HeadLearning(config, "target", lambda: self.now)
        self.refuses = False

    def answer(self, call: Call) -> list[list[Any]]:
        self.calls.append(call)
        match call.method:
            case "spec_rollout_head":
                return [[dict(self.head), {}]]
            case "spec_rollout_load_drafter" if self.refuses:
                return [[{"cause": "it does not fit", "hint": "", "is_forbidden": False}]]
            case "spec_rollout_load_drafter":
                return [[{}]]
            case "spec_rollout_drafter_ready":
                return [[{"is_ready": True}]]
            case "spec_rollout_end_drafter":
                self.head["is_trained"] |= call.args[1]
                return [[{"version": 1}]]
            case "spec_rollout_ends":
                return [[7, 7]]
        raise AssertionError(call.method)

    def beat(self, is_busy: bool = False, after: float = 10.0) -> bool:
        self.now += after
        return self.drive(self.learning.beat(is_busy))

    def drive(self, conversation: Any) -> bool:
        answers = None
        while True:
            try:
                answers = self.answer(conversation.send(answers))
            except StopIteration as end:
                return end.value

    def loaded(self) -> list[str]:
        return [Path(call.args[1]).name for call in self.calls if call.method == "spec_rollout_load_drafter"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setattr(parent, "TrainerProcess", FakeTrainer)
    FakeTrainer.made = []
    made = FakeEngine(tmp_path)
    made.learning.turned({"asked": 0}, 0.0)
    yield made
    made.learning.close()


def write(folder: Path, number: int) -> None:
    (folder / str(number)).mkdir()
    (folder / str(number) / "config.json").write_text("{}")


def test_a_first_head_is_learned_prefilled_for_published_and_loaded(engine: FakeEngine, tmp_path: Path) -> None:
    engine.learning.arrived()
    assert not engine.beat(is_busy=True) and not FakeTrainer.made
    engine.beat()
    engine.beat()
    (trainer,) = FakeTrainer.made
    assert trainer.wish == Wish(is_halted=False, learning=1)
    assert (trainer.duty.is_new, trainer.duty.num_levels, Path(trainer.duty.head).name) == (True, 6, "0")
    # it takes rows: the engine's own come first, and with them what the policy has become
    trainer.says(wants_rows=True)
    assert not engine.beat() and trainer.wish.is_halted
    assert engine.beat()
    assert engine.calls[-1] == Call("spec_rollout_ends", (engine.learning.address, 0))
    engine.learning.turned({"asked": 100, "computed": 100}, 2.0)
    assert engine.beat(after=0.2) and engine.calls[-1].args[1] == 7, "what it has is not sent again"
    engine.learning.turned({"asked": 0, "computed": 0}, 0.0)
    assert not engine.beat() and not trainer.wish.is_halted
    trainer.says(own=2.0, serving=0.01)
    engine.beat()
    assert trainer.wish.publish == 1
    engine.beat()
    assert trainer.wish.publish == 1 and engine.loaded() == []
    write(tmp_path, 1)
    trainer.says(published=1, own=0.0)
    engine.beat()
    assert engine.loaded() == ["1"] and trainer.served == ["1"]
    gauges = engine.learning.as_dict()
    assert (gauges["number"], gauges["parent"], gauges["trainer_state/training"]) == (1, 0, 1)


def test_a_request_halts_a_trainer_on_the_engines_cores_before_the_next_beat(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.beat()
    (trainer,) = FakeTrainer.made
    assert not trainer.wish.is_halted
    engine.learning.arrived()
    assert trainer.wish.is_halted
    engine.learning.close()
    own = FakeEngine(tmp_path, ("cpu:0",))
    own.beat()
    own.learning.arrived()
    assert not FakeTrainer.made[-1].wish.is_halted
    own.learning.close()


def test_an_engine_that_went_back_has_the_trainer_drop_that_head(engine: FakeEngine, tmp_path: Path) -> None:
    engine.beat()
    (trainer,) = FakeTrainer.made
    write(tmp_path, 1)
    engine.beat()
    engine.head |= {"went_back": 1}
    engine.beat()
    assert trainer.wish.backs == 1 and trainer.served == ["1", "0"] and not (tmp_path / "1").exists()
    assert (engine.learning.number, engine.learning.as_dict()["went_back"]) == (0, 1)
    trainer.says(ended=1)
    engine.beat()
    assert engine.learning.is_waiting
    trainer.says(own=2.0, serving=0.5)
    engine.head |= {"positions": spot.ENOUGH, "met": spot.ENOUGH // 2}
    engine.beat()
    engine.beat()
    assert trainer.wish.publish == 2, "its number is not given twice"
    # and when it is met less often than it was then, learning begins again
    trainer.says(failed=2, own=0.0)
    for times in range(2, 4):
        engine.head |= {"positions": times * spot.ENOUGH, "met": spot.ENOUGH // 2 + (times - 1) * spot.ENOUGH // 3}
        engine.beat()
    assert trainer.wish.learning == 2 and not trainer.wish.is_halted and not engine.learning.is_waiting


def test_a_head_that_does_not_fit_is_tried_once_and_ends_the_trainer(engine: FakeEngine, tmp_path: Path) -> None:
    engine.refuses = True
    engine.beat()
    write(tmp_path, 1)
    engine.beat()
    engine.beat()
    assert engine.loaded() == ["1"] and engine.learning.number == 0
    assert FakeTrainer.made[0].error == "head 1 cannot be loaded: it does not fit" and not engine.learning.is_learning


def test_of_several_engines_one_leads_the_others_prefill_and_load(engine: FakeEngine, tmp_path: Path) -> None:
    other = FakeEngine(tmp_path)
    engine.beat()
    other.beat()
    assert len(FakeTrainer.made) == 1
    assert not other.beat(), "nobody takes rows"
    socket = Path(engine.learning.address.removeprefix("ipc://"))
    socket.touch()
    try:
        assert other.beat() and not other.beat(is_busy=True)
    finally:
        socket.unlink()
    write(tmp_path, 1)
    assert not engine.beat() and not other.beat()
    assert engine.loaded() == other.loaded() == ["1"]
    # the next one leads where the leader has gone
    engine.learning.close()
    other.head |= {"is_trained": False}
    other.beat()
    other.beat()
    assert len(FakeTrainer.made) == 2 and FakeTrainer.made[-1].wish.publish == 1
    other.learning.close()


def test_an_engine_that_is_called_gets_the_best_head_of_the_call_at_its_end(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two rollouts nothing says what a head is worth in the engine."""
    llm = SimpleNamespace(spec_rollout_learning=engine.learning)
    wished: list[tuple[bool, int]] = []

    def asked(llm: Any, conversation: Any, check: Any) -> bool:
        for trainer in FakeTrainer.made:
            wished.append((engine.now < 30.0, trainer.wish.publish))
            trainer.says(own=2.0 if engine.now < 20.0 else 3.0, serving=0.01)
            if trainer.wish.publish and engine.now > 32.0:
                if not (tmp_path / "1").exists():
                    write(tmp_path, 1)
                trainer.says(published=1, own=0.0)
        return engine.drive(conversation)

    def slept(seconds: float) -> None:
        engine.now += seconds

    monkeypatch.setattr(loop, "ask", asked)
    monkeypatch.setattr(loop.time, "sleep", slept)
    told = loop.learn(llm, seconds=30.0)
    assert set(wished) == {(True, 0), (False, 0), (False, 1)}
    assert told["number"] == 1 and engine.loaded() == ["1"] and 32.0 < engine.now < 34.0
    assert FakeTrainer.made[0].wish.is_halted, "the engine's cores are its own again"
    # a trainer that does not write is not waited for without end
    monkeypatch.setattr(FakeTrainer, "says", lambda *_, **__: None)
    FakeTrainer.made[0].said = Said(own=3.0, serving=2.0, published=1)
    engine.head |= {"positions": spot.ENOUGH, "met": spot.ENOUGH // 2}
    begin = engine.now
    loop.learn(llm, seconds=10.0)
    assert FakeTrainer.made[0].wish.publish == 2 and 70.0 <= engine.now - begin < 72.0


def test_a_sleeping_engine_and_one_whose_drafter_is_lent_are_left_alone(engine: FakeEngine) -> None:
    engine.head |= {"is_asleep": True}
    engine.beat()
    engine.head |= {"is_asleep": False, "is_lent": True}
    engine.beat()
    assert not FakeTrainer.made


def test_of_the_heads_that_were_published_the_newest_are_kept(engine: FakeEngine, tmp_path: Path) -> None:
    engine.beat()
    for number in range(6):
        write(tmp_path, number)
        engine.beat()
    assert parent.numbers_in(tmp_path) == [0, 3, 4, 5]
    assert json.loads((tmp_path / "5" / "config.json").read_text()) == {}
