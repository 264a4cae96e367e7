"""Reports of trainers to a running engine, and questions to it: rewards, epochs, weights for the model that drafts,
what the history holds, and how drafters are.

What belongs here: the checks of what is reported, the names a request may have inside vLLM, and the sums over workers
and engines. `server/endpoints.py` offers the same over HTTP; the worker's side is `worker/calls.py`.

Each conversation is two functions: of an engine that is called (`LLM`, `LLMEngine`), and, beginning with `a`, of one
that is awaited (`AsyncLLM`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.config.checks import MOST_ID, check_finite, check_range
from vllm_specrollout.errors import ConfigError, ForbiddenError, UnsupportedError, shown
from vllm_specrollout.history.epochs import MAX_EPOCH, check_epoch
from vllm_specrollout.history.epochs import EpochError as EpochError
from vllm_specrollout.server.asking import (
    Answers,
    Call,
    Conversation,
    both,
    check_has_model,
    check_is_on,
    check_keeps_history,
)

MAX_REWARDS = 65_536
"""Most rewards of one report."""
MAX_INDEX = 65_535
"""Highest index of a sample."""
REWARDS_AT_ONCE = 4096
"""Rewards in one call of the workers, which serve no request meanwhile."""


class WeightsError(ConfigError):
    """The drafter that runs cannot take the weights that were named."""


@dataclass(frozen=True, slots=True)
class ReportedReward:
    """The reward of one answer."""

    request_id: str
    reward: float
    index: int | None = None
    """Which sample of the request; None: it has one."""


# --- the conversations -----------------------------------------------------------------------------------------------


def reporting(rewards: Sequence[ReportedReward]) -> Conversation[dict[str, int]]:
    """Send rewards; an id that one engine does not know may be another's."""
    if len(rewards) > MAX_REWARDS:
        raise ConfigError(
            f"{len(rewards)} rewards in one report; the limit is {MAX_REWARDS}", "split them over several calls"
        )
    matched = repeated = 0
    # at least one call, so that an engine that cannot be asked says so
    for start in range(0, max(1, len(rewards)), REWARDS_AT_ONCE):
        some = rewards[start : start + REWARDS_AT_ONCE]
        entries = [(candidates(entry.request_id, entry.index), entry.reward) for entry in some]
        answers = yield Call("spec_rollout_report_rewards", (entries,))
        matched += sum(counts["matched"] for counts in _living(answers))
        repeated += sum(counts["repeated"] for counts in _living(answers))
    return {"matched": matched, "repeated": repeated, "unknown": max(0, len(rewards) - matched - repeated)}


def reporting_all(rewards: Mapping[str, float | Sequence[float]]) -> Conversation[dict[str, int]]:
    """Tell an engine what its answers were worth; better ones then weigh more in the drafts of the next epoch.

    Args:
        rewards: request id (`RequestOutput.request_id`) -> reward, or for `n > 1` a list with one reward per sample, in
            the order of `RequestOutput.outputs`. Finite numbers; arrays and tensors of them are fine.

    Returns:
        How many rewards were "matched" to an answer, "repeated" (took the place of an earlier one) and "unknown". Late,
        repeated and unknown ids are counted, not refused.

    Raises:
        ConfigError: a reward or an id cannot be used, there are more than `MAX_REWARDS`, or it is no such engine.
        UnsupportedError: the engine keeps no history.
    """
    return reporting(flatten(rewards))


def beginning(epoch: int | None = None) -> Conversation[int]:
    """Tell an engine that the trainer begins its next epoch, or the one named; returns the epoch begun.

    Of several engines all begin it, or none does.

    Raises:
        EpochError: `epoch` is below the present one, or more than `MAX_JUMP` behind it. One that went far
            ahead of all answers is taken back.
        ConfigError: it is no epoch, or no such engine.
        UnsupportedError: the engine keeps no history.
    """
    if epoch is not None:
        check_range("epoch", epoch, 0, MAX_EPOCH)
        # asked first: of several engines, none shall begin what another would refuse
        stores = [report["store"] for report in _living((yield Call("spec_rollout_history"))) if report]
        present, lowest = map(max, zip((0, 0), *((one["epoch"], one["lowest"]) for one in stores), strict=True))
        check_epoch(present, epoch, lowest)
    answers = yield Call("spec_rollout_begin_epoch", (epoch,))
    # ranks that keep no history echo the number they were given
    begun = max(_living(answers))
    if epoch is not None and begun > epoch:
        # another client began a later one between the two calls
        check_epoch(begun, epoch)
    return begun


def reading() -> Conversation[dict[str, Any]]:
    """What the history holds, in plain JSON types.

    Returns:
        "engines": per engine, counts, bytes and hits. "total": their sums, the latest epoch, and "hit_rate": of the
        times the history was asked for a draft, the share in which it had one.

    Raises:
        ConfigError: it is no such engine.
        UnsupportedError: the engine keeps no history.
    """
    answers = yield Call("spec_rollout_history")
    # of an engine's workers, those that do not draft say nothing
    engines = [report for report in _living(answers) if report]
    total = _sum(engines)
    total["hit_rate"] = total["hits"] / total["lookups"] if total.get("lookups") else 0.0
    return {"total": total, "engines": engines}


def reading_drafters() -> Conversation[dict[str, Any]]:
    """How drafters and budget are, in plain JSON types.

    Returns:
        "engines": of each engine its "drafters" by their names, and its "budget". Of each, its "state" (`alive`,
        `probation` or `given up`), how often it "failed" lately, the last "error", and the "steps" until it is tried
        again.

    Raises:
        ConfigError: it is no such engine.
        UnsupportedError: spec rollout is off.
    """
    answers = yield Call("spec_rollout_health")
    # those that do not draft say nothing
    return {"engines": [found for workers in answers for found in workers if found]}


def loading(path: str | Path, below: str | None = None) -> Conversation[int]:
    """Give the model that drafts other weights of the same shape; requests go on running.

    Args:
        path: a folder that `specrollout train-head` wrote, or one safetensors file, where the engine can read it.
        below: the folder in which it must lie; None: anywhere.

    Returns:
        How often its weights were swapped since the engine began.

    Raises:
        WeightsError: they cannot be read, do not fit, or cannot draft; the drafter goes on with its own.
        ForbiddenError: they lie outside of `below`.
        ConfigError: it is no such engine.
        UnsupportedError: no model drafts in this engine.
    """
    answers = yield Call("spec_rollout_load_drafter", (str(path), below))
    for answer in _flat(answers):
        if "cause" in answer:
            raise (ForbiddenError if answer.get("is_forbidden") else WeightsError)(answer["cause"], answer["hint"])
    return max(answer["version"] for answer in _flat(answers))


report_rewards, areport_rewards = both("report_rewards", reporting_all, check_keeps_history)
begin_epoch, abegin_epoch = both("begin_epoch", beginning, check_keeps_history)
read_history, aread_history = both("read_history", reading, check_keeps_history)
read_drafters, aread_drafters = both("read_drafters", reading_drafters, check_is_on)
load_drafter, aload_drafter = both("load_drafter", loading, check_has_model)


# --- what is given ---------------------------------------------------------------------------------------------------


def candidates(request_id: str, index: int | None) -> list[str]:
    """The names an answer may have in vLLM, likeliest first, without the random suffix of its internal name.

    vLLM puts `index_` before the name of each sample of `n > 1`. Behind the id that the client sees, its completions
    endpoint puts `-prompt`, even for one prompt, its batched chat endpoint `_conversation`, its responses endpoint
    `_turn`; and the choices of several prompts are numbered through.
    """
    single = [request_id, f"{request_id}-0", f"{request_id}_0"]
    if index is None:
        return single
    names = [f"{index}_{request_id}", f"{index}_{request_id}-0", f"{request_id}-{index}", f"{request_id}_{index}"]
    return names + [name for name in single if index == 0 and name not in names]


def flatten(rewards: Mapping[str, float | Sequence[float]]) -> list[ReportedReward]:
    """One entry per answer.

    Raises:
        ConfigError: an id or a reward cannot be used.
    """
    if not isinstance(rewards, Mapping):
        raise ConfigError(
            f"`rewards` is a {type(rewards).__name__}, not a mapping",
            "give {request_id: reward}, or {request_id: [reward of each sample]}",
        )
    entries: list[ReportedReward] = []
    for request_id, given in rewards.items():
        _check_id(request_id)
        # arrays and tensors, with one number or several
        value = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            where = f"rewards[{shown(request_id)}]"
            check_range(f"number of samples in {where}", len(value), 0, MAX_INDEX + 1)
            entries += [
                ReportedReward(request_id, check_finite(f"{where}[{i}]", one), i) for i, one in enumerate(value)
            ]
        else:
            entries.append(ReportedReward(request_id, check_finite(f"rewards[{shown(request_id)}]", value)))
    return entries


def _check_id(request_id: Any) -> None:
    if not isinstance(request_id, str):
        raise ConfigError(
            f"a request's id is {shown(request_id)}, of type {type(request_id).__name__}",
            "give `RequestOutput.request_id`, which is a str",
        )
    if not 0 < len(request_id) <= MOST_ID:
        raise ConfigError(
            f"a request's id has {len(request_id)} characters, outside 1 to {MOST_ID}",
            "give the id that vLLM returned",
        )


def _flat(answers: Answers) -> list[Any]:
    return [answer for workers in answers for answer in workers]


def _living(answers: Answers) -> list[Any]:
    """What the workers of those engines answered that keep a history.

    Raises:
        UnsupportedError: all have given it up.
    """
    refusals = [[a for a in workers if isinstance(a, Mapping) and "cause" in a] for workers in answers]
    if answers and all(refusals):
        raise UnsupportedError(refusals[0][0]["cause"], refusals[0][0]["hint"])
    return _flat([workers for workers, refused in zip(answers, refusals, strict=True) if not refused])


def _sum(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, bytes and seconds add up, also within groups; of epochs the latest counts; rates and texts have none."""
    total: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            if name in ("epoch", "lowest"):
                total[name] = max(total.get(name, 0), value)
            elif isinstance(value, Mapping):
                total[name] = _sum([total.get(name, {}), value])
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and not name.endswith("_rate"):
                total[name] = total.get(name, 0) + value
    return total
