"""Stock and ours, each in a process of its own, all alive at once; who runs when, and what stock's steps cost."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import Problem
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from .engine_process import EngineProcess, EngineSpec
from .rows import Pair, Run, first_difference

STOCK, OURS = "stock", "ours"
PROMPT_LEN = 256
"""Most tokens of a prompt; the tasks' prompts have 15 to 100."""
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Engines without a core apart: requests arrive at the same step in every run, and an idle engine waits on its pipe."""
WARM_UP_TOKENS = 16
Report = Callable[[str, int], None]
"""Told what happens now, and how many units of progress are done since."""
A = TypeVar("A", bound=Hashable)
C = TypeVar("C", bound=Hashable)
_EXTEND_REPEATS = 5
_CORES = 4
"""Of an engine that shares none: its two processes, what they start, and what else runs."""
_TITLES = {STOCK: STOCK, OURS: "spec rollout"}


class Engines:
    """Started engines by name; a context manager.

    Args:
        arguments: of `vllm.LLM`, the same for all.
        report: told of the engines' starts.
        environment: variables of all their processes.
        common: what else their `EngineSpec`s have in common.
    """

    def __init__(
        self, arguments: dict[str, Any], report: Report, *, environment: dict[str, str] | None = None, **common: Any
    ) -> None:
        self.report, self._arguments, self._environment, self._common = report, arguments, environment or {}, common
        self._stack = ExitStack()
        self._processes: dict[str, EngineProcess] = {}
        # what stock answered to the same requests the first time
        self._first: dict[str, Run] = {}

    def __enter__(self) -> Self:
        with self._stack:
            self.begin()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> EngineProcess:
        return self._processes[name]

    def begin(self) -> None:
        """Start what is there from the beginning: nothing."""

    def start(
        self,
        name: str,
        spec_rollout: dict[str, Any] | None = None,
        *,
        has_plugin: bool | None = None,
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> EngineProcess:
        """Start one more; one unit of progress.

        Args:
            spec_rollout: our configuration; None: drafts nothing.
            has_plugin: whether our plugin is loaded; default: if there is a configuration.
            more: further arguments of `vllm.LLM`.
        """
        spec = EngineSpec(
            name=_TITLES.get(name, name),
            arguments={**self._arguments, **more},
            has_plugin=spec_rollout is not None if has_plugin is None else has_plugin,
            spec_rollout=spec_rollout,
            environment={**self._environment, **(environment or {})},
            **self._common,
        )
        with self.doing(f"starting the {name} engine"):
            self._processes[name] = self._stack.enter_context(EngineProcess(spec))
        return self._processes[name]

    def stop(self, name: str) -> None:
        """End one: its memory is free for those that start later."""
        self._processes.pop(name).close()

    def ask(self, name: str, operation: str, /, **arguments: Any) -> Any:
        """As `EngineProcess.ask`, once every other engine has left the processor alone."""
        self.wait_for(name)
        return self[name].ask(operation, **arguments)

    def tell(self, name: str, method: str, /, **arguments: Any) -> Any:
        """What our engine's worker answers to a method `spec_rollout_...` of its."""
        return self.ask(name, "rpc", method=f"spec_rollout_{method}", **arguments)

    def wait_for(self, name: str) -> None:
        """Wait until this engine has the processor for itself, where those that idle would take a share of it."""
        is_crowded = len(os.sched_getaffinity(0)) < _CORES * len(self._processes)
        if is_crowded and not IN_ONE_PROCESS.items() <= self._environment.items():
            others = [engine for other, engine in self._processes.items() if other != name]
            time.sleep(max((engine.quiet_in() for engine in others), default=0.0))

    @contextmanager
    def doing(self, title: str) -> Iterator[None]:
        """One unit of progress."""
        self.report(title, 0)
        yield
        self.report("", 1)

    def run(self, name: str, prompts: Sequence[list[int]], params: list[dict[str, Any]], **more: Any) -> Run:
        """These requests to their ends, by one engine; stock's answers are compared with its first ones.

        Args:
            more: arguments of `engine_child.DrivenEngine.generate`.
        """
        has_stats = self[name].spec.spec_rollout is not None
        reply = self.ask(name, "generate", prompts=list(prompts), params=params, stats=has_stats, **more)
        run = Run.from_child(reply)
        if name == STOCK:
            first = self._first.setdefault(json.dumps([prompts, params]), run)
            run = replace(run, itself=first_difference(first, run))
        return run

    def record(self, *requests: Any, **more: Any) -> Run:
        """Stock's answers, given twice: also its warm-up, and the comparison of stock with itself."""
        self.run(STOCK, *requests, **more)
        return self.run(STOCK, *requests, **more)

    def encode(self, chosen: Sequence[Problem], most: int = PROMPT_LEN) -> list[list[int]]:
        """Prompt tokens of each problem, at most so many."""
        found = self[STOCK].ask("encode", texts=[prompt_text(problem.prompt) for problem in chosen])
        return [ids[:most] for ids in found]

    def prompts(self, count: int, most: int = PROMPT_LEN) -> list[list[int]]:
        """Prompts of the tasks, the same in every benchmark that does not say otherwise."""
        return self.encode(problems(count, seed=0), most)

    def rounds(
        self,
        cells: Mapping[C, Sequence[A]],
        numbers: Iterable[int],
        run: Callable[..., Run | None],
        *,
        is_apart: bool = False,
        after: Callable[[C, int], None] = lambda cell, number: None,
    ) -> dict[tuple[C, A], list[Pair]]:
        """Every cell's arms beside stock, round by round; a unit of progress for each time that stock runs.

        Args:
            cells: cell -> its arms.
            numbers: of the rounds; -1 is the warm-up.
            run: (cell, arm, number=) -> what that arm (None: stock) runs in that round; None leaves it out.
            is_apart: each arm has a run of stock of its own.
            after: told of a cell and a round when all its arms have run.
        """
        pairs: dict[tuple[C, A], list[Pair]] = {(cell, arm): [] for cell, arms in cells.items() for arm in arms}
        for number, (cell, arms) in itertools.product(numbers, cells.items()):
            when = f"round {number + 1}" if number >= 0 else "warm-up"
            for some in [[arm] for arm in arms] if is_apart else [arms]:
                with self.doing(f"{when}: {cell}, {', '.join(map(str, some))}"):
                    for arm, pair in run_round(number, some, functools.partial(run, cell, number=number)).items():
                        pairs[cell, arm].append(pair)
            after(cell, number)
        return pairs

    def extend_ms(self, prefixes: list[list[int]], num_tokens: list[int], seed: int) -> dict[int, list[float]]:
        """n -> milliseconds of stock's steps that append n tokens to each prefix, which fill whole KV cache blocks."""
        return self.ask(STOCK, "extend", prefixes=prefixes, num_tokens=num_tokens, repeats=_EXTEND_REPEATS, seed=seed)


def interleaved(number: int, arms: Sequence[A]) -> list[A | None]:
    """Who runs when in one round; None is stock. Even: stock, then all. Odd: backwards, stock in their middle.

    So drift of the host favours nobody: of one arm and stock, each goes first in every other round.
    """
    if number % 2 == 0:
        return [None, *arms]
    middle = -(-len(arms) // 2)
    backwards: list[A | None] = list(reversed(arms))
    return [*backwards[:middle], None, *backwards[middle:]]


def run_round(number: int, arms: Sequence[A], run: Callable[[A | None], Run | None]) -> dict[A, Pair]:
    """One run of each in that order, paired with stock's of this round; round -1 is the warm-up.

    Args:
        run: what an arm runs (None: stock); None leaves it out.
    """
    runs = {arm: found for arm in interleaved(number, arms) if (found := run(arm)) is not None}
    stock = runs.pop(None)
    return {arm: Pair(stock=stock, ours=found, is_timed=number >= 0) for arm, found in runs.items() if arm is not None}


def sampling(
    seed: int, max_tokens: int, options: dict[str, Any] | None = None, *, is_to_the_end: bool = False
) -> dict[str, Any]:
    """`SamplingParams` of one request at temperature 1.

    Args:
        options: the request's own for our engine; None: none, as for stock.
        is_to_the_end: go on to `max_tokens` whatever is sampled.
    """
    values: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
    if is_to_the_end:
        values["ignore_eos"] = True
    if options is not None:
        values["extra_args"] = {"spec_rollout": options}
    return values


def asking(owners: Sequence[Problem], seed: int, max_tokens: int, *, is_ours: bool) -> list[dict[str, Any]]:
    """`SamplingParams` of an answer to each of these problems; only our engine is told which one it is."""
    return [
        sampling(seed + i, max_tokens, {"problem_id": problem.problem_id} if is_ours else None)
        for i, problem in enumerate(owners)
    ]


def write_answers(path: Path, answers: dict[str, Sequence[int]]) -> Path:
    """What the oracle drafts: problem id -> tokens."""
    path.write_text(json.dumps({name: list(ids) for name, ids in answers.items()}), encoding="utf-8")
    return path
