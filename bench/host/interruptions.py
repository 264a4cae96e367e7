"""Interruptions of a running batch: a warm drafter that attaches and detaches, and faults of it.

Run: `python -m bench.host.interruptions attach`. The drafter is a process of its own, on the last core; the engine has
the others. Tokens are compared with stock vLLM's.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.policy import DRAFT
from bench.runner.display import Display
from bench.runner.models import CACHE, find_model

NAME = "warm"
_PATIENCE_S = 120.0


@dataclass
class Run:
    """One batch, step by step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    # [steps] milliseconds of a step, with what was done before it
    steps: list[float] = field(default_factory=list)
    # [steps] tokens of all requests when the step ended
    ends: list[int] = field(default_factory=list)


def _decode(llm: Any, args: argparse.Namespace, before: Callable[[int], None] = lambda step: None) -> Run:
    from vllm import SamplingParams

    from bench.policy.reward import problems
    from bench.policy.tokenizer import prompt_text

    engine, run, told = llm.llm_engine, Run(), {}
    encode = llm.get_tokenizer().encode
    for i, problem in enumerate(problems(args.requests, 0)):
        prompt = {"prompt_token_ids": encode(prompt_text(problem.prompt), add_special_tokens=False)}
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=args.max_tokens, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        before(len(run.steps))
        for out in engine.step():
            told[out.request_id] = len(out.outputs[0].token_ids)
            if out.finished:
                run.tokens[out.request_id] = list(out.outputs[0].token_ids)
        run.steps.append((time.perf_counter() - begin) * 1e3)
        run.ends.append(sum(told.values()))
    return run


class Attaching:
    """Attaches every few steps, and detaches as soon as drafts have come."""

    def __init__(self, ask: Callable[..., Any], address: str) -> None:
        self._ask, self._address = ask, address
        self._began: float | None = None
        self._next = 10
        # seconds from the call until the drafter's first tree had come
        self.seconds: list[float] = []
        # steps with such a call before them
        self.touched: list[int] = []

    @property
    def is_attached(self) -> bool:
        return self._began is not None

    def __call__(self, step: int) -> None:
        if self._began is not None:
            if self._ask("drafters_state")[NAME]["trees"]:
                self.seconds.append(time.perf_counter() - self._began)
                self._began, self._next = None, step + 4
                self._ask("detach_drafter", NAME)
                self.touched.append(step)
        elif step >= self._next:
            self._began = time.perf_counter()
            self._ask("attach_drafter", NAME, self._address)
            self.touched.append(step)


class Faults:
    """The drafter is stopped, goes on, and is killed; nobody begins it anew."""

    def __init__(self, ask: Callable[..., Any], address: str, pid: int) -> None:
        self._ask, self._address, self._pid = ask, address, pid
        self.last = 40

    def __call__(self, step: int) -> None:
        if step == 5:
            self._ask("attach_drafter", NAME, self._address)
        elif step in (20, 30):
            os.kill(self._pid, signal.SIGSTOP if step == 20 else signal.SIGCONT)
        elif step == self.last:
            os.kill(self._pid, signal.SIGKILL)


def _makespan_after(step: int, run: Run, stock: Run) -> float:
    """Milliseconds from a step of a run to its end, of what stock vLLM takes for the same tokens."""
    done = run.ends[step]
    same = next(i for i, tokens in enumerate(stock.ends) if tokens >= done)
    return sum(run.steps[step + 1 :]) / sum(stock.steps[same + 1 :])


def _prepare() -> list[int]:
    """The host's cores; the engine, which is about to be begun here, gets all but the last."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("error: this host has one core; engine and drafter need one each\n\nhint: use a host with two")
    os.sched_setaffinity(0, cores[:-1])
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "spec_rollout"}
    os.environ |= {"OMP_NUM_THREADS": str(len(cores) - 1), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return cores


def attach(args: argparse.Namespace) -> None:
    cores = _prepare()
    from vllm import LLM

    from vllm_specrollout.cluster.child import Command, WarmDrafter

    with Display() as display:
        model, title = find_model(None, args.size, "float32", CACHE, display, is_policy=True)
    common = {"dtype": "float32", "seed": 0, "enforce_eager": True, "max_num_seqs": args.requests}
    common |= {"max_model_len": 768, "kv_cache_memory_bytes": 1 << 28}
    own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 8, "placement": "decoupled"}
    attached, faulty = [], []
    warm = WarmDrafter(Command.of(str(DRAFT), [f"cpu:{cores[-1]}"], common))
    try:
        stock = LLM(model=str(model), **common)
        ours = LLM(model=str(model), **common, spec_rollout=own)

        def ask(method: str, *given: Any) -> Any:
            (answer,) = ours.collective_rpc(method, args=given)
            if "cause" in answer:
                raise SystemExit(f"error: {answer['cause']}\n\nhint: {answer['hint']}")
            return answer

        for round_ in range(-1, args.rounds):
            plain = _decode(stock, args)
            _wait(warm)
            attaching = Attaching(ask, warm.address)
            attached.append((plain, _decode(ours, args, attaching), attaching))
            if attaching.is_attached:
                ask("detach_drafter", NAME)
            faults = Faults(ask, warm.address, warm.process.pid or 0)
            plain, run = _decode(stock, args), _decode(ours, args, faults)
            ask("detach_drafter", NAME)
            if round_ >= 0:
                faulty.append(_makespan_after(faults.last, run, plain))
            _check(plain, run)
            _check(*attached[-1][:2])
    finally:
        warm.stop()
    seconds = [one for *_, attaching in attached[1:] for one in attaching.seconds]
    typical, most = statistics.median(seconds), max(seconds)
    print(f"{title}: attached {len(seconds)} times: drafts after {typical:.3f} s, at most {most:.3f} s")
    _show([(run, attaching.touched) for _, run, attaching in attached[1:]])
    print(f"from the last fault to the end, of stock's time: {', '.join(f'{one:.2f}' for one in faulty)}")


def _wait(warm: Any) -> None:
    """Until the drafter is there."""
    end = time.monotonic() + _PATIENCE_S
    while not warm.address:
        if time.monotonic() > end:
            raise SystemExit("error: the drafter's process does not get ready\n\nhint: read its log above")
        time.sleep(0.1)


def _check(stock: Run, ours: Run) -> None:
    wrong = [name for name, tokens in stock.tokens.items() if ours.tokens[name] != tokens]
    if wrong:
        raise SystemExit(f"error: {len(wrong)} of {len(stock.tokens)} requests differ from stock vLLM: {wrong}")


def _show(runs: list[tuple[Run, list[int]]]) -> None:
    """Of steps with an attach or detach before them, and of the others."""
    touched = [run.steps[step] for run, steps in runs for step in steps]
    others = [ms for run, steps in runs for step, ms in enumerate(run.steps) if step not in set(steps)]
    step, most = statistics.median(others), max(touched)
    print(f"all tokens are stock vLLM's; a step {step:.1f} ms, at most {max(others):.1f} ms; with an attach or detach")
    print(f"before it {statistics.median(touched):.1f} ms, at most {most:.1f} ms = {most / step:.2f} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("attach",))
    parser.add_argument("--size", default="150M", help="the policy's cost")
    parser.add_argument("--requests", type=int, default=2, help="in the batch, all at once")
    parser.add_argument("--max-tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind; one without a timing comes first")
    attach(parser.parse_args())


if __name__ == "__main__":
    main()
