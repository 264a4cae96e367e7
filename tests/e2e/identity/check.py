"""The check itself: stock's answers, ours without drafts, ours with every kind of draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm import LLM

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import Report, compare, run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fuzz import FuzzDrafter
from tests.e2e.identity.ties import JUDGE, Judge
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import RequestView, StepRecord

VOCAB = 400
TOTAL = Report()
ALIKE = Report()
"""Of all compared, what came from hosts and dtypes whose rows are alike: there ties are rare."""
QUALITIES = (0.8, 0.95, 0.2)
ENOUGH = 16
"""Tokens from which on the answers to one kind of request are long enough for drafts to have been accepted."""


class Accepted(Listener):
    """Draft tokens verified and accepted by problem, as an engine's speculator tells of them."""

    def __init__(self, ours: Engine) -> None:
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self._problem_of: dict[str, str] = {}
        ours.runner.spec_rollout.listeners.append(self)

    def admitted(self, view: RequestView) -> None:
        self._problem_of[view.request_id] = view.problem_id

    def stepped(self, record: StepRecord) -> None:
        counts = zip(record.trees.request_ids, record.trees.sizes, record.result.num_accepted, strict=True)
        for request_id, size, accepted in counts:
            problem = self._problem_of.get(request_id, "")
            self.drafted[problem] += int(size)
            self.accepted[problem] += int(accepted)

    def missing(self, requests: Sequence[Case], answers: Sequence[Any], *, must_accept: bool = True) -> list[str]:
        """Kinds of requests without a draft accepted (or verified, at least), although their answers are long.

        Verified drafts are not asked for under a grammar, which may cut all that a model without training drafts.
        """
        counted = self.accepted if must_accept else self.drafted
        tokens: Counter[str] = Counter()
        found: Counter[str] = Counter()
        for case, answer in zip(requests, answers, strict=True):
            if not must_accept and "structured_outputs" in case.params:
                continue
            # neither the first token nor the one that ends an answer is ever drafted
            lengths = [len(one.token_ids) - 1 - (one.finish_reason == "stop") for one in answer.outputs]
            tokens[case.name] += sum(max(length, 0) for length in lengths)
            found[case.name] += counted[case.problem_id]
        return [name for name, count in tokens.items() if count >= ENOUGH and not found[name]]


def check_identity(
    path: str,
    dtype: str,
    requests: Sequence[Case],
    rounds: int = 1,
    num_drafters: int = 1,
    stock: dict[str, Any] | None = None,
    inspect: Callable[[Engine], None] | None = None,
    must_accept: bool = True,
    **kwargs: Any,
) -> None:
    """Level B and level C of docs/concepts/exactness.md, with drafts that were accepted; totals go to TOTAL.

    Args:
        path: model folder.
        rounds: how often all requests run with fresh fuzzed drafts.
        num_drafters: how many fuzzed ones draft for the same requests, their trees united; 0: the engine's own do.
        stock: engine arguments of stock where they differ from ours.
        inspect: looks at our engine after the last round.
        must_accept: False: drafts may all be wrong.
        kwargs: engine arguments of both.
    """
    theirs = {**kwargs, **(stock or {})}
    theirs.pop("spec_rollout", None)
    with engine(path, dtype, is_ours=False, **theirs) as plain_stock:
        truth = run(plain_stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    drafted: list[Any] = []
    with engine(path, dtype, is_ours=True, **kwargs) as ours:
        rows_are_alike = are_alike(ours)
        plain = run(ours.llm, requests, enabled=False)
        for number in range(rounds):
            quality = QUALITIES[number % len(QUALITIES)]
            if num_drafters:
                fuzz(ours, answers, number, quality, num_drafters)
            accepted = Accepted(ours)
            drafted.append(run(ours.llm, requests))
            ours.runner.settle()
            missing = accepted.missing(requests, truth, must_accept=must_accept and bool(num_drafters))
            assert not missing, f"nothing drafted for: {missing}"
            assert accepted.accepted.total() > 0 or not must_accept
            if rows_are_alike:
                level_b = compare(requests, plain, drafted[-1], dtype)
                assert not level_b.failures, level_b.failures[:10]
        if inspect is not None:
            inspect(ours)
    # where rows are unlike, with drafts and without may differ by ties: both are held against stock, which can repeat
    # its own batches, and so prove each
    for got in drafted if rows_are_alike else [plain, *drafted]:
        level_c = judged(path, dtype, requests, truth, got, **theirs)
        assert not level_c.failures, level_c.failures[:10]
        TOTAL.add(level_c)
        if rows_are_alike:
            ALIKE.add(level_c)


def fuzz(ours: Engine, answers: Mapping[str, list[int]], seed: int, quality: float, num_drafters: int = 1) -> None:
    """Have drafts of all kinds drafted, by so many drafters where the host drafts."""
    if hasattr(ours.runner, "drafts"):
        from tests.v2.fuzz import FuzzLookup

        FuzzLookup(ours.runner, answers, VOCAB, seed, quality)
        return
    ours.runner.spec_rollout.replace_drafters(
        FuzzDrafter(answers, VOCAB, seed=seed + 1000 * other, quality=quality) for other in range(num_drafters)
    )


def at_a_steady_speed(ours: Engine) -> None:
    """Have budget `auto` take each step for as long as its rows say, and drafters for free: no host is the like, and
    on none of them would drafts not pay."""
    speculator, timed = ours.runner.spec_rollout, ours.runner.drafting.timed
    speculator._clock = lambda: 0.0
    ours.runner.drafting.timed = lambda timing: timed(
        timing and replace(timing, step_ms=10.0 + 0.01 * timing.rows, ask_ms=0.0)
    )


def are_alike(ours: Engine) -> bool:
    """Whether a row's bits are those of plain decoding, as the engine found at its start; else level B knows ties.

    The V2 runner attends to drafts by another way than to plain steps.
    """
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    rows = stats.get("rows")
    return rows is not None and rows["are_alike"]


def judged(
    path: str,
    dtype: str,
    requests: Sequence[Case],
    wanted: Sequence[Any],
    got: Sequence[Any],
    ask: Callable[[LLM, Case], Any] = lambda llm, case: run(llm, [case])[0],
    **stock: Any,
) -> Report:
    """Compare answers; if any differ, a further stock engine proves ties. `ask` has it answer one request."""
    report = compare(requests, wanted, got, dtype)
    if not report.failures:
        return report
    with engine(path, dtype, is_ours=False, **{**stock, **JUDGE}) as judge:

        def among_all(case: Case) -> Any:
            batch = [case if one.problem_id == case.problem_id else one for one in requests]
            if batch not in asked:
                asked.append(batch)
                shown = [replace(one, params=_with_logits(one.params)) for one in batch]
                judge.llm.reset_prefix_cache()  # or prompts have fewer rows than they had
                answered.append(run(judge.llm, shown))
            answers = answered[asked.index(batch)]
            return answers[batch.index(case)]

        asked: list[list[Case]] = []
        answered: list[Sequence[Any]] = []
        return compare(requests, wanted, got, dtype, Judge(lambda case: ask(judge.llm, case), among_all))


def _with_logits(params: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in params.items() if key != "logprob_token_ids"}, "logprobs": -1}
