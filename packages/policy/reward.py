"""The verifiable reward, and deterministic sets of problems to train and to hold out."""

import random
import re
import zlib
from collections.abc import Iterator

from vllm_specrollout.config.checks import check_choice, check_range

from .tasks import FAMILIES, Problem, make_problem

SPLITS = ("train", "held_out")
_HELD_OUT_SHARE = 16
"""One prompt in this many is held out."""

_FINAL = re.compile(r"[Tt]he answer is\s*(-?)\s*(\d{1,4})\s*\.\s*\Z")


def reward(problem: Problem, text: str) -> float:
    """1.0 if `text` ends in the sentence "The answer is N." with the right N, else 0.0.

    Text that was cut off, says nothing final, goes on after the sentence, or is no task answer at all earns 0.0; a
    special token at the end (`<|end|>`) and white space do no harm. Steps are not judged: only the result counts.
    """
    match = _FINAL.search(text.strip().removesuffix("<|end|>"))
    if match is None:
        return 0.0
    value = int(match[2]) * (-1 if match[1] else 1)
    return float(value == problem.answer)


def split_of(prompt: str) -> str:
    """`train` or `held_out`, a property of the prompt's text, so that the two can never share a problem."""
    return "held_out" if zlib.crc32(prompt.encode()) % _HELD_OUT_SHARE == 0 else "train"


def draw_problems(
    rng: random.Random, family: str, split: str, name: str, *, max_terms: int | None = None
) -> Iterator[Problem]:
    """Endless problems of one family and split; may repeat. `name` opens their ids."""
    index = 0
    while True:
        problem = make_problem(rng, family, f"{name}-{index}", max_terms=max_terms)
        if split_of(problem.prompt) == split:
            index += 1
            yield problem


def problems(count: int, seed: int, family: str | None = None, *, split: str = "held_out") -> list[Problem]:
    """A set of `count` different problems, equal for equal arguments.

    Without a family, the families take turns. A set is a prefix of any longer set with the same other arguments.
    """
    check_range("count", count, 0, 1 << 30)
    check_choice("split", split, SPLITS)
    families = FAMILIES if family is None else (family,)
    for name in families:
        check_choice("family", name, FAMILIES)
    streams = [
        draw_problems(random.Random(f"{split}/{name}/{seed}"), name, split, f"{split}-{name}-{seed}")
        for name in families
    ]
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        problem = next(streams[len(chosen) % len(streams)])
        chosen.setdefault(problem.prompt, problem)
    return list(chosen.values())
