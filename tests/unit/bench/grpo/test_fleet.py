"""A group of engines in the place of one."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from bench.grpo.fleet import Arm, Fleet


class Group:
    """Answers end in another order than they were asked in."""

    def stream(self, prompts: list[list[int]], params: list[Any]) -> Iterator[tuple[int, Any]]:
        for i in reversed(range(len(prompts))):
            yield i, SimpleNamespace(token_ids=(*prompts[i], params[i]["seed"]), request=f"r{i}")


def test_answers_of_a_group_stand_in_the_order_of_their_prompts() -> None:
    run, named = Fleet._run_by(Group(), [[1], [2], [3]], [{"seed": seed} for seed in (7, 8, 9)])
    assert run.token_ids == ((1, 7), (2, 8), (3, 9))
    assert named == ["r0", "r1", "r2"]
    assert run.finish_s[0] >= run.finish_s[1] >= run.finish_s[2] > 0.0, "the first one ended last"
    assert run.wall_s == max(run.finish_s) and run.totals is None


def test_an_arm_of_several_engines_is_a_group() -> None:
    assert Arm(name="group", engines=2).is_group and not Arm(name="ours").is_group
