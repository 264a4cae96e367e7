"""Profiles of drafters: what an engine learns of one, what is kept of it, and what a file may say."""

from __future__ import annotations

import copy
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.test_reconfigure import BEAT, Engine
from vllm_specrollout.budgets.profile import ProfileKey
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.cluster.link import Beat
from vllm_specrollout.cluster.profiles import DrafterProfile, draft_line, kept, line_at, of_engine, of_model, read, save
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import StepTiming

KEY = ProfileKey(model="m", dtype="float32", device="a core", vllm="0.32.0", tensor_parallel=1, is_eager=True)
TIME = {"fixed_ms": 13, "per_request_ms": 0.04, "per_row_ms": 0.03}
WRITTEN: dict[str, Any] = {"draft": TIME, "verify": {"1": TIME}, "among": [0.6, 0.7]}


def profile(**changes: Any) -> DrafterProfile:
    given = {"draft": AffineTime(0.1, 4.0), "verify": {1: AffineTime(0.3, 13.0, 0.05)}, "ranks": "0010820" * 50}
    own = {"target": "big", "drafter": "small", "device": "cpu: a core", "key": KEY}
    return DrafterProfile(**{**given, **own, **changes})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-specrollout" / "profiles" / "drafters"


def test_an_engine_keeps_what_it_learned_whenever_that_rests_on_twice_as_much() -> None:
    engine = Engine()
    engine.link.beats.extend([BEAT] * 5)
    for count in (255, 1, 255, 1, 512):
        engine.link.ranks += [0, 1, 9] * (count // 3) + [0] * (count % 3)
        engine.link.ranked += count
        engine.step()
        engine.step()
    assert [len(one.ranks) for one in engine.kept] == [256, 512, 1024]
    last = engine.kept[-1]
    assert last.drafter == "small" and last.device == "cpu: a core"
    assert last.draft.ms(16) == pytest.approx(9.0, rel=0.02) and last.verify[1].ms(16, 2.0) == pytest.approx(
        21.6, rel=0.02
    )
    assert last.match().among(1) == pytest.approx(1 / 3, abs=0.01) and last.match().among(8) < 0.7, "9 is none of them"


def test_a_drafter_that_is_lent_again_and_again_is_learned_over_all_its_links() -> None:
    engine = Engine()
    for number in range(3):
        engine.link.beats.extend([BEAT] * 5)
        engine.step()
        # the request is over, what is known of it is there at last, and the drafter is taken back
        engine.link.ranks += [number] * 100
        engine.link.ranked += 100
        gone = engine.drafter.links.pop("one")
        engine.step()
        engine.drafter.links["one"] = other = copy.copy(gone)
        other.ranked, other.ranks = 0, deque()
    (found,) = engine.kept
    assert found.ranks == "0" * 100 + "1" * 100 + "2" * 100


def test_nothing_is_kept_of_a_drafter_that_did_not_say_what_it_is_or_has_not_drafted() -> None:
    engine = Engine()
    engine.link.ranks += [0] * 300
    engine.link.ranked = 300
    engine.step()
    assert engine.kept == [] and engine.learning.profile(engine.link) is None, "no pass"
    engine.link.beats.append(BEAT)
    engine.link.model = ""
    assert engine.learning.profile(engine.link) is None


def test_what_is_kept_is_found_by_the_engine_that_is_alike_and_by_the_models_name() -> None:
    two = other(tensor_parallel=2)
    first, wider, foreign = (
        profile(),
        profile(key=two, verify={2: AffineTime(0.2, 9.0)}),
        profile(key=other(model="n"), target="n"),
    )
    for one in (first, wider, foreign):
        save(one)
    save(newer := profile(ranks="0" * 500))
    assert of_engine(kept(), KEY) == [newer], "in the place of the older one"
    (both,) = of_model(kept(), "big")
    assert set(both.verify) == {1, 2}
    assert of_model(kept(), "unknown") == [] and len(of_model(kept(), "n")) == 1


def other(**changes: Any) -> ProfileKey:
    fields = ("model", "dtype", "device", "vllm", "tensor_parallel", "is_eager")
    return ProfileKey(**{**{name: getattr(KEY, name) for name in fields}, **changes})


def test_of_a_drafter_on_several_devices_the_one_that_is_known_best_counts() -> None:
    best = profile(device="cuda: a card", ranks="0" * 400)
    assert of_engine([profile(), best], KEY) == [best]


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
    found = read(path, "--profile")
    assert found.draft == found.verify[1] == AffineTime(0.04, 13.0, 0.03)
    assert found.fan_out == 2 and found.match().among(2) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ("nonsense", "is no profile of a drafter"),
        (
            {"draft": {"fixed_ms": "1"}},
            "is no profile of a drafter: Expected `float`, got `str` - at `..draft.fixed_ms`",
        ),
        ({"draft": {**TIME, "fixed_ms": -1}}, "`fixed_ms` is -1.0, not a time"),
        ({"verify": {"x": TIME}}, "is no profile of a drafter"),
        ({"verify": {}}, "says nothing of a verifier"),
        ({"depth": 3}, "contains unknown field `depth`"),
        ({"among": []}, "has to say how drafts match"),
        ({"ranks": "00"}, "in one way"),
        ({"among": [0.7, 0.6]}, "give rising shares|match rates are"),
        ({"among": [], "ranks": "0x"}, "more than digits"),
    ],
)
def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path, changes: Any, cause: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps({**WRITTEN, **changes}))
    with pytest.raises(ConfigError, match=cause):
        read(path, "--profile")


def test_a_file_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(Path("nowhere.json"), "--profile")


def test_a_drafters_line_is_what_its_passes_took() -> None:
    beats: deque[Beat] = deque()
    for streams in (1, 2, 4, 8, 16, 8, 4, 2):
        beats.append(Beat(50 * (5.0 + 0.75 * streams), 50, 50 * streams))
    line = draft_line(beats)
    assert line is not None
    for streams in (1, 5):
        assert line.ms(streams) == pytest.approx(5.0 + 0.75 * streams, rel=0.1)


def test_a_line_has_no_term_below_nothing() -> None:
    cost = StepCost()
    for batch, ms in ((1, 30.0), (8, 10.0), (8, 11.0)):
        cost.observe(StepTiming(batch, batch, 0, 0, batch, ms, True))
    line = line_at(cost, 8, 3.0)
    assert min(line.fixed_ms, line.per_request_ms, line.per_row_ms) >= 0.0
    assert line_at(cost, 0, 0.0).ms(1) > 0.0
