"""The commands of the first hour, in the order in which they run: each one's words, and what it may take. Pure.

What it may well take is a guess from the first run; its limit is generous, for what is compiled is compiled in the
command that first needs it. A dry walk has the same commands, small enough for a CPU and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

STEPS = ("micro", "speed", "strict", "curves", "graphs", "checks")
"""In the order in which they run: what tells most comes first, in case nothing more is to be had. `_MAKERS` says what
each is."""
MICRO = {"rows": 15, "products": 35, "attention": 45, "verify": 20, "lookup": 25, "drafter": 60}
"""Part of `bench micro` -> seconds that it may well take."""
_START_S = {"7B": 110, "1.5B": 70, "0.5B": 60, "tiny": 30}
_ROW_S, _TRACES_S = 8, 40
_CELLS = {"chain": "1x1024:15,8x1024:7,32x1024:3,7,64x512:1,3,256x512:0,1", "tree": "1x1024:15,8x1024:7"}
"""Of `speed`. No step of more than eight requests drafts trees."""
_OTHER = "1.5B"
"""A shape with heads of 128, beside the small one's of 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
    # of the step `speed`; empty: its own
    cells: str = ""
    arms: tuple[str, ...] = ("chain", "tree")
    # of the identity steps, and of `speed` and `curves`
    small: str = "0.5B"
    large: str = "7B"
    budget: str = "fixed"
    seed: int = 0


def jobs(options: Options) -> list[Job]:
    """In the order of the steps."""
    return [job for step in options.steps for job in _MAKERS[step](options)]


def _micro(options: Options) -> Iterator[Job]:
    # each in a process of its own: one that fails or hangs costs no other
    for part, expected_s in MICRO.items():
        made = _job("micro", part, expected_s, "bench", "micro", "--part", part, *_cpu(options))
        # little is compiled here, so what takes long hangs; a CPU takes longer
        yield made if options.is_dry else replace(made, limit_s=30 + 2 * expected_s)


def _speed(options: Options) -> Iterator[Job]:
    for arm in options.arms:
        cells, size = options.cells or _CELLS[arm], ("--tokens", "64", "--rounds", "2", "--trace", "1,64")
        if options.is_dry:
            cells, size = options.cells or "2x64:5", ("--tokens", "40", "--rounds", "1", "--trace", "2")
        # one command for all cells: to start its engines takes longest
        expected_s = _TRACES_S + _ROW_S * cells.replace("x", ":").count(",") + _ROW_S
        shared = ("--cells", cells, *size, "--logit-std", "0.05", "--budget", options.budget, "--arms", arm)
        yield _device(options, "speed", f"{arm}, {cells}", options.large, expected_s, *shared)


def _strict(options: Options) -> Iterator[Job]:
    # trees round apart from plain decoding, kernels invariant or not
    for model in (options.small, _OTHER)[: 1 if options.is_dry else 2] if "chain" in options.arms else ():
        nodes = "15" if model == _OTHER else "7,15"
        cells = "2x64:5" if options.is_dry else f"1x1024:{nodes},8x1024:{nodes}"
        shared = ("--cells", cells, "--tokens", _tokens(options), "--arms", "stock,chain", "--strict")
        yield _device(options, "strict", f"chains, no tie allowed, {model}", model, 45, *shared)


def _curves(options: Options) -> Iterator[Job]:
    size = ("--model", options.large, "--batch", "64", "--rounds", "2")
    if options.is_dry:
        size = (
            "--model",
            "tiny",
            "--batch",
            "2",
            "--waves",
            "1",
            "--tokens",
            "8",
            "--budget",
            "fixed",
            "--interpreted",
        )
    yield _job("curves", "recorded answers", _START_S[options.large] + 60, "bench", "curves", *size)


def _graphs(options: Options) -> Iterator[Job]:
    arms = "stock,ngram,tree" if "tree" in options.arms else "stock,chain"
    cells = "2x64:5" if options.is_dry else "1x1024:15,8x1024:15"
    # a dry walk meets both runners: what runs on a GPU, interpreted, and what runs on a CPU
    how = ("--interpreted",) if options.is_dry else ("--graphs",)
    shared = ("--cells", cells, "--tokens", _tokens(options), "--arms", arms, *how)
    yield _device(options, "graphs", arms, options.small, 60, *shared)


def _checks(options: Options) -> Iterator[Job]:
    yield _job("checks", "doctor", 30, "doctor", "--json")
    if not options.is_dry:  # a dry walk has no device; tests check the interpreted one
        yield _job("checks", "doctor --gpu", 60, "doctor", "--gpu", "--json")
    for kernel in ("attention", "verify", "commit"):
        yield _job("checks", kernel, 60, "bench", "kernels", "--kernels", kernel, *_cpu(options))


def _cpu(options: Options) -> tuple[str, ...]:
    return ("--device", "cpu") if options.is_dry else ()


def _tokens(options: Options) -> str:
    return "12" if options.is_dry else "64"


def _device(options: Options, step: str, name: str, model: str, seconds: int, *more: str) -> Job:
    shared, expected_s = ("bench", "device", "--seed", str(options.seed), "--verbose", *more), _START_S[model] + seconds
    if options.is_dry:
        # some hosts' bfloat16 rounds by the number of rows, and needs instructions that not all of them allow
        dtype = () if "--interpreted" in more else ("--dtype", "float32")
        return _job(step, name, expected_s, *shared, "--model", "tiny", "--dry", *dtype)
    # a compiler that does not fit the host's torch is the likeliest to fail, and graphs need none
    return replace(_job(step, name, expected_s, *shared, "--model", model), retry=("--uncompiled",))


def _job(step: str, name: str, expected_s: float, *arguments: str) -> Job:
    return Job(step=step, name=name, arguments=arguments, expected_s=expected_s, limit_s=120 + 3 * expected_s)


_MAKERS: dict[str, Callable[[Options], Iterator[Job]]] = {
    # rows, products, attention, verdicts, lookups and a drafter's passes, each beside what was predicted
    "micro": _micro,
    # our engine beside stock's: tokens, times, and what five steps are made of
    "speed": _speed,
    # batch-invariant kernels in both engines: chains' tokens are stock's, without a tie
    "strict": _strict,
    # recorded answers replayed at the large shape's cost
    "curves": _curves,
    # with CUDA graphs: whether stock repeats its tokens, and whether ours are stock's
    "graphs": _graphs,
    # `specrollout doctor`, an engine of ours against its own plain decoding, kernels against their specifications
    "checks": _checks,
}
