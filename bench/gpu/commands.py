"""The commands of the first hour, in the order in which they run: each one's words, and what it may take. Pure.

What it may well take is a guess; its limit is generous, for what is compiled is compiled in the command that first
needs it. A dry walk has the same commands, small enough for a CPU and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

STEPS = ("stock", "selfcheck", "graphs", "checks", "eager", "kernels", "speed")
"""In the order in which they run: what tells most comes first, in case nothing more is to be had. `_MAKERS` says what
each is."""
_START_S = {"7B": 110, "0.5B": 60, "tiny": 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of `specrollout`."""

    step: str
    name: str
    # all that its figures depend on, besides versions, code and device
    arguments: tuple[str, ...]
    # seconds that it may well take: it is not begun with less left; and after which it is given up
    expected_s: float
    limit_s: float
    # further words of a second attempt
    retry: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.step}, {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    steps: tuple[str, ...] = STEPS
    is_dry: bool = False
    # of the steps `kernels` and `speed`; empty: each one's own
    cells: str = ""
    taus: tuple[str, ...] = ("4", "6.5")
    arms: tuple[str, ...] = ("chain", "tree")
    rivals: tuple[str, ...] = ()
    # of the identity steps, and of `kernels` and `speed`
    small: str = "0.5B"
    large: str = "7B"
    budget: str = "fixed"
    seed: int = 0


def commands(options: Options) -> list[Command]:
    """In the order of the steps."""
    return [command for step in options.steps for command in _MAKERS[step](options)]


def _selfcheck(options: Options) -> Iterator[Command]:
    if not options.is_dry:  # a dry walk has no device; tests check the interpreted one
        yield _command("selfcheck", "doctor --gpu", 60, "doctor", "--gpu", "--json")


def _checks(options: Options) -> Iterator[Command]:
    yield _command("checks", "doctor", 30, "doctor", "--json")
    device = ("--device", "cpu") if options.is_dry else ()
    for kernel in ("attention", "verify", "commit"):
        yield _command("checks", kernel, 60, "bench", "kernels", "--check", "--kernels", kernel, *device)


def _kernels(options: Options) -> Iterator[Command]:
    own = ("--model", options.large)
    contexts = [options.cells] if options.cells else ["1x1024,8x1024,32x1024", "1x16384,8x16384,32x16384"]
    if options.is_dry:
        own, contexts = ("--model", "0.5B", "--device", "cpu", "--nodes", "7"), ["1x64"]
    for cells in contexts:
        timed = ("bench", "kernels", "--time", *own, "--cells", cells)
        yield _command("kernels", f"attention {cells}", 90, *timed, "--kernels", "attention")
    yield _command("kernels", "verify and commit", 60, *timed, "--kernels", "verify,commit")


def _device(options: Options, step: str, name: str, seconds: int, *more: str, is_large: bool = False) -> Command:
    model = "tiny" if options.is_dry else options.large if is_large else options.small
    dry = ("--dry",) if options.is_dry else ()
    if options.is_dry and "--interpreted" not in more:
        # some hosts' bfloat16 rounds by the number of rows, and needs instructions that not all of them allow
        dry = ("--dry", "--dtype", "float32")
    shared = ("--model", model, "--seed", str(options.seed), "--verbose", *dry)
    made = _command(step, name, _START_S[model] + seconds, "bench", "device", *shared, *more)
    # a compiler that does not fit the host's torch is the likeliest to fail, and graphs need none
    return made if options.is_dry else replace(made, retry=("--uncompiled",))


def _identity_size(options: Options) -> tuple[str, ...]:
    if options.is_dry:
        return "--cells", "2x64", "--nodes", "5", "--tokens", "12"
    return "--cells", "1x1024,8x1024", "--nodes", "15", "--tokens", "64"


def _stock(options: Options) -> Iterator[Command]:
    size = (*_identity_size(options), "--arms", "stock")
    yield _device(options, "stock", "twice the same requests", 30, *size, *_interpreted(options))


def _interpreted(options: Options) -> tuple[str, ...]:
    # a dry walk meets both runners: what runs on a GPU, interpreted, and what runs on a CPU
    return ("--interpreted",) if options.is_dry else ()


def _identity(step: str, options: Options) -> Iterator[Command]:
    size = _identity_size(options)
    how = ("--eager", *_interpreted(options)) if step == "eager" else ("--graphs",)
    if "tree" in options.arms:
        yield _device(options, step, "trees and ngram", 60, *size, *how, "--arms", "ngram,tree")
    if "chain" in options.arms:
        yield _device(options, step, "chains, no tie allowed", 45, *size, *how, "--arms", "stock,chain", "--strict")


def _speed(options: Options) -> Iterator[Command]:
    cells, taus, tokens, rounds = options.cells or "1x1024,32x1024", options.taus, "256", "3"
    if options.is_dry:
        cells, taus, tokens, rounds = options.cells or "2x64", taus[:1], "24", "1"
    size = ("--cells", cells, "--tokens", tokens, "--rounds", rounds, "--logit-std", "0.05")
    shared = (*size, "--budget", options.budget)
    rows = len(cells.split(",")) * len(taus) * len(options.arms)
    arms = ("--taus", ",".join(taus), "--arms", ",".join(options.arms), "--profile")
    # one command for all cells: to start its engines takes longest
    yield _device(options, "speed", cells, 15 + 15 * rows, *shared, *arms, is_large=True)
    for rival in options.rivals:
        other = ("--taus", taus[len(taus) // 2], "--arms", f"vllm-{rival}")
        yield _device(options, "speed", f"vLLM {rival}, {cells}", 30, *shared, *other, is_large=True)


def _command(step: str, name: str, expected_s: float, *arguments: str) -> Command:
    return Command(step=step, name=name, arguments=arguments, expected_s=expected_s, limit_s=120 + 3 * expected_s)


_MAKERS: dict[str, Callable[[Options], Iterator[Command]]] = {
    # stock vLLM alone: which runner, attention, graphs and scheduling it chose; if it fails, nothing else matters
    "stock": _stock,
    # an engine of ours against its own plain decoding
    "selfcheck": _selfcheck,
    # `specrollout doctor`, the kernels against their specifications
    "checks": _checks,
    # ours without CUDA graphs, and with them: whether its tokens are stock's
    "eager": partial(_identity, "eager"),
    "graphs": partial(_identity, "graphs"),
    # our kernels beside FlashAttention 3, timed in CUDA graphs
    "kernels": _kernels,
    # our engine beside stock's: tokens, times, and how long the device idles
    "speed": _speed,
}
