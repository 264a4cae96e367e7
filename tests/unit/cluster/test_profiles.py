"""Profiles of drafters: what an engine learns of one, what is kept of it, and what a file may say."""

import copy
import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.drafters import nothing_accepted
from tests.reference.decoupled import VOCABULARY, Wire, sampling
from vllm_specrollout.budgets.profile import ProfileKey
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.cluster import profiles
from vllm_specrollout.cluster.link import Following, Link, LinkCounts, Score
from vllm_specrollout.cluster.messages import Work
from vllm_specrollout.cluster.profiles import DrafterProfile, Learning, OwnDrafts, kept, of_engine, of_model, save
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import StepRecord, StepTiming, empty_trees

BEAT = Work(450.0, 50, 800)
"""Passes of 9 ms, of sixteen requests."""
KEY = ProfileKey(model="m", dtype="float32", device="a core", vllm="0.32.0", tensor_parallel=1, is_eager=True)
TIME = {"fixed_ms": 13, "per_request_ms": 0.04, "per_row_ms": 0.03}
WRITTEN: dict[str, Any] = {"draft": TIME, "verify": {"1": TIME}, "match": 0.6}


def profile(**changes: Any) -> DrafterProfile:
    given = {"draft": AffineTime(0.1, 4.0), "verify": {1: AffineTime(0.3, 13.0, 0.05)}, "match": 0.6}
    own = {"target": "big", "drafter": "small", "device": "cpu: a core", "key": KEY, "positions": 350}
    return DrafterProfile(**{**given, **own, **changes})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-specrollout" / "profiles" / "drafters"


class Engine:
    """Sixteen requests, and a drafter elsewhere."""

    def __init__(self) -> None:
        self.wire = Wire(random.Random(1))
        given = {"window": 8, "connect": lambda address: self.wire.box("one")}
        self.drafter = DecoupledDrafter(sampling, 0, vocab_size=VOCABULARY, **given)
        self.drafter.attach("one", "one")
        self.link.model, self.link.device = "small", "cpu: a core"
        self.link.beats.extend([BEAT] * 5)
        self.kept: list[DrafterProfile] = []
        self.learning = Learning(self.drafter.links, self.kept.append)

    @property
    def link(self) -> Link:
        return self.drafter.links["one"]

    def ended(self, tried: int, matched: int) -> None:
        """Requests are over for which so much was drafted."""
        self.link.counts.over += Score(tried, matched, matched)

    def step(self, *, nodes: int = 32, tokens: int = 40, is_decode_only: bool = True) -> None:
        """A step is over: 12 ms and 0.2 for each row."""
        timing = StepTiming(16, 16 + nodes, nodes, 0, tokens, 12.0 + 0.2 * (16 + nodes), is_decode_only)
        self.learning.stepped(StepRecord(None, empty_trees([]), nothing_accepted(0), timing))


def test_an_engine_keeps_what_it_learned_whenever_that_rests_on_twice_as_much() -> None:
    engine = Engine()
    for count in (255, 1, 255, 1, 512):
        engine.ended(count, count // 2)
        engine.step()
        engine.step()
    assert [one.positions for one in engine.kept] == [256, 512, 1024]
    last = engine.kept[-1]
    assert (last.drafter, last.device) == ("small", "cpu: a core") and last.match == pytest.approx(0.5, abs=0.01)
    assert [last.draft.ms(16), last.verify[1].ms(16, 2.0)] == pytest.approx([9.0, 21.6], rel=0.02)


def test_a_drafter_that_is_lent_again_and_again_is_learned_over_all_its_links() -> None:
    engine = Engine()
    for number in range(3):
        engine.step()
        # the request is over, what is known of it is there at last, and the drafter is taken back
        engine.ended(100, 30 * number)
        gone = engine.drafter.links.pop("one")
        engine.step()
        engine.drafter.links["one"] = other = copy.copy(gone)
        other.counts, other._asked = LinkCounts(), Score()
    (found,) = engine.kept
    assert found.positions == 300 and found.match == pytest.approx(0.3)


def test_old_positions_count_less_as_weights_change() -> None:
    engine = Engine()
    for matched in (0, 4000, 4000, 4000, 4000):
        engine.ended(4000, matched)
        engine.step()
    found = engine.learning.profile(engine.link)
    assert found is not None and found.positions == 20_000 and found.match > 4 / 5


def test_what_an_engine_has_by_itself_is_learned_while_nobody_elsewhere_drafts() -> None:
    engine = Engine()
    engine.step(is_decode_only=False)
    assert engine.learning.own is None
    for _ in range(20):
        engine.step(nodes=64, tokens=40)
    own = engine.learning.own
    assert own == OwnDrafts(2.5, 4.0)
    engine.link.open["r"] = Following(1, "r")
    for _ in range(20):
        engine.step(nodes=0, tokens=16)
    assert engine.learning.own == own, "a drafter elsewhere takes part"


def test_nothing_is_kept_of_a_drafter_that_did_not_say_what_it_is_or_has_not_drafted() -> None:
    engine = Engine()
    engine.link.beats.clear()
    engine.ended(300, 200)
    engine.step()
    assert engine.kept == [] and engine.learning.profile(engine.link) is None, "no pass"
    engine.link.beats.append(BEAT)
    engine.link.model = ""
    assert engine.learning.profile(engine.link) is None


def test_what_is_kept_is_found_by_the_engine_that_is_alike_and_by_the_models_name() -> None:
    save(profile())
    save(profile(key=other(tensor_parallel=2), verify={2: AffineTime(0.2, 9.0)}))
    save(profile(key=other(model="n"), target="n"))
    save(newer := profile(positions=500))
    assert of_engine(kept(), KEY) == [newer], "in the place of the older one"
    assert of_engine([newer, profile(device="cuda: a card", positions=400)], KEY) == [newer], "it is known best"
    (both,) = of_model(kept(), "big")
    assert set(both.verify) == {1, 2}
    assert of_model(kept(), "unknown") == [] and len(of_model(kept(), "n")) == 1


def other(**changes: Any) -> ProfileKey:
    fields = ("model", "dtype", "device", "vllm", "tensor_parallel", "is_eager")
    return ProfileKey(**{**{name: getattr(KEY, name) for name in fields}, **changes})


def test_a_file_that_is_damaged_costs_no_other(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(profile())
    (folder / "half.json").write_text('{"draft": ')
    assert kept() == [profile()] and "half.json cannot be used" in caplog.text


def test_a_disk_that_refuses_costs_nothing_but_the_profile(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    save(profile())
    assert "is not kept" in caplog.text


def test_a_file_that_somebody_wrote_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(WRITTEN))
    found = profiles.read(path, "--profile")
    assert found.draft == found.verify[1] == AffineTime(0.04, 13.0, 0.03)
    assert found.match == 0.6 and found.own is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ("nonsense", "is no profile of a drafter"),
        ({"draft": {"fixed_ms": "1"}}, "Expected `float`, got `str` - at `..draft.fixed_ms`"),
        ({"draft": {**TIME, "fixed_ms": -1}}, "`fixed_ms` is -1.0, not a time"),
        ({"verify": {"x": TIME}}, "is no profile of a drafter"),
        ({"verify": {}}, "Expected `object` of length >= 1 - at `..verify`"),
        ({"depth": 3}, "contains unknown field `depth`"),
        ({"verify": {"1": {"fixed_ms": 0, "per_request_ms": 0}}}, "a verifier on 1 devices takes no time"),
        ({"match": 1.5}, "Expected `float` <= 1.0 - at `..match`"),
        ({"own": {"tokens": 0.5, "drafts": 3}}, "Expected `float` >= 1.0 - at `..own.tokens`"),
    ],
)
def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path, changes: Any, cause: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps({**WRITTEN, **changes}))
    with pytest.raises(ConfigError, match=cause):
        profiles.read(path, "--profile")


def test_a_file_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        profiles.read(Path("nowhere.json"), "--profile")


def test_a_drafters_line_is_what_its_passes_took() -> None:
    line = profiles.draft_line(deque(Work(50 * (5.0 + 0.75 * s), 50, 50 * s) for s in (1, 2, 4, 8, 16, 8, 4, 2)))
    assert line is not None
    for streams in (1, 5):
        assert line.ms(streams) == pytest.approx(5.0 + 0.75 * streams, rel=0.1)


def test_a_line_has_no_term_below_nothing() -> None:
    cost = StepCost()
    for batch, ms in ((1, 30.0), (8, 10.0), (8, 11.0)):
        cost.observe(StepTiming(batch, batch, 0, 0, batch, ms, True))
    line = profiles.line_at(cost, 8, 3.0)
    assert min(line.fixed_ms, line.per_request_ms, line.per_row_ms) >= 0.0
    assert profiles.line_at(cost, 0, 0.0).ms(1) > 0.0
