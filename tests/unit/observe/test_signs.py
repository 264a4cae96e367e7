import pytest

from tests.trees import batch_of, chain
from tests.unit.observe.engine import ending, record_of, timing_of, view
from vllm_specrollout.observe.metrics import EVERY_S, LEAST_S, Gain, Signs
from vllm_specrollout.types import EMPTY_TREE, StepPlan, StepRecord


def step(
    tokens: int, *, nodes: int = 0, ms: float = 10.0, plain_ms: float = 0.0, is_decode_only: bool = True
) -> StepRecord:
    """Of two requests; drafts are of the first, and are accepted but for the last one."""
    trees = batch_of([chain([7] * nodes) if nodes else EMPTY_TREE, EMPTY_TREE])
    plan = StepPlan(trees, "pays", True, plain_ms=plain_ms)
    timing = timing_of(nodes, ms, tokens=tokens, is_decode_only=is_decode_only)
    return record_of(trees, [list(range(max(nodes - 1, 0))), []], plan, timing=timing)


class Log:
    def __init__(self) -> None:
        self.now, self.lines = 0.0, list[str]()
        self.signs = Signs(self.lines.append, lambda: self.now)

    def step(self, after_s: float, record: StepRecord) -> None:
        self.now += after_s
        self.signs.stepped(record)


def test_a_step_with_drafts_is_measured_against_plain_ones_for_as_many_tokens() -> None:
    gain = Gain()
    gain.add(step(6, nodes=5, ms=12.0, plain_ms=10.0))
    assert gain.is_known and gain.tokens_per_step == 3.0
    assert gain.speedup == pytest.approx(30.0 / 12.0)
    gain.add(step(2, ms=10.0))
    assert gain.speedup == pytest.approx(40.0 / 22.0), "a step without drafts is a plain one"
    gain.add(step(9, nodes=2, ms=500.0, plain_ms=1.0, is_decode_only=False))
    assert gain.request_steps == 4, "prompts cost the same with drafts and without"


def test_drafts_whose_plain_step_is_not_known_gain_nothing() -> None:
    gain = Gain()
    gain.add(step(6, nodes=5))
    assert gain.speedup == 1.0 and not gain.is_known


def test_a_line_comes_once_a_minute_and_speaks_of_that_minute() -> None:
    log = Log()
    log.signs.admitted(view("a", [1]))
    for _ in range(3):
        log.step(EVERY_S / 2, step(6, nodes=5, ms=12.0, plain_ms=10.0))
    (line,) = log.lines
    assert "1 requests run; 3.00 tokens a step, 80% of 15 draft tokens accepted, 2.50 times plain" in line
    for _ in range(3):
        log.step(EVERY_S / 2, step(2))
    assert "1.00 tokens a step, no drafts" in log.lines[1] and "times" not in log.lines[1]


def test_the_end_of_a_rollout_is_told_unless_it_was_short() -> None:
    for lasts_s, lines in ((LEAST_S / 2, 0), (LEAST_S, 1)):
        log = Log()
        for name in "ab":
            log.signs.admitted(view(name, [1]))
        log.step(0.0, step(2))
        log.step(lasts_s, step(2))
        log.signs.finished(ending("a", [1]))
        assert log.lines == []
        log.signs.finished(ending("b", [1]))
        assert len(log.lines) == lines
    assert log.lines[0].startswith("Spec rollout: rollout over; 1.00 tokens a step")
