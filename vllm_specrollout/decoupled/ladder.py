"""The draft ladder: what each drafting method is worth at each acceptance, built without the target.

Source: SpecActor, section 4.2. What belongs here: the ladder, how it is built, kept and read, and the choice of one
method for a whole batch. Which method a freed worker gets is in assignment.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specrollout.config.checks import check_real
from vllm_specrollout.decoupled.rates import Mode, coupled_rate, plain_rate
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.decoupled.timetable import StepTime, decoupled_rate, shared_stream, step_time, timetable
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.broken_line import Floats

GRID = tuple(i / 20 for i in range(20))
"""Acceptance rates of a ladder: 0 to 0.95."""
MAX_WINDOW = 16
DRAWS = 20_000
"""Windows, or runs of matches, drawn for each value. Of 1,200 values so drawn none was more than 1.5 % off."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Rung:
    """One drafting method, at each acceptance of the ladder."""

    method: str
    # [A] the best window
    windows: tuple[int, ...]
    # [A] its speed over plain decoding, by the formula
    speedups: tuple[float, ...]
    # [A] the same with tokens accepted or rejected at random; empty if none were drawn
    drawn: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ladder:
    """Speed-ups by method and acceptance, for one batch and one mode.

    Raises:
        ConfigError: lengths or values that make no ladder.
    """

    batch: int
    mode: Mode
    # [A] probabilities, ascending
    acceptance: tuple[float, ...]
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        rates = self.acceptance
        if not rates or list(rates) != sorted(set(rates)) or not 0.0 <= rates[0] <= rates[-1] <= 1.0:
            raise ConfigError("a ladder's acceptances are not ascending from 0 to 1", "build it anew")
        if len({rung.method for rung in self.rungs}) != len(self.rungs) or not self.rungs:
            raise ConfigError("a ladder has no method, or one twice", "name each method once")
        for rung in self.rungs:
            values = rung.speedups + rung.drawn
            fits = len(rung.windows) == len(rung.speedups) == len(rates) and len(rung.drawn) in (0, len(rates))
            if not fits or not all(math.isfinite(v) and v > 0.0 for v in values) or min(rung.windows) < 1:
                raise ConfigError(
                    f"a ladder's values of `{rung.method}` are no speed-ups at {len(rates)} acceptances",
                    "build it anew",
                )

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order they were given."""
        return tuple(rung.method for rung in self.rungs)

    def speedup(self, method: str, acceptance: float) -> float:
        """Between two acceptances of the ladder on the straight line; beyond them, the nearest one's.

        Raises:
            ConfigError: no such method, or no probability.
        """
        check_real(f"acceptance of {method}", acceptance, 0, 1)
        return float(np.interp(acceptance, self.acceptance, self._rung(method).speedups))

    def window(self, method: str, acceptance: float) -> int:
        """The best window at the ladder's nearest acceptance.

        Raises:
            ConfigError: no such method, or no probability.
        """
        check_real(f"acceptance of {method}", acceptance, 0, 1)
        nearest = int(np.argmin(np.abs(np.asarray(self.acceptance) - acceptance)))
        return self._rung(method).windows[nearest]

    def _rung(self, method: str) -> Rung:
        for rung in self.rungs:
            if rung.method == method:
                return rung
        raise ConfigError(f"the ladder has no method `{method}`", f"choose from: {', '.join(self.methods)}")

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        body = {"format": _FORMAT, **asdict(self)}
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Selection:
    """The one method for a batch; None where plain decoding is faster than all."""

    method: str | None
    speedup: float
    # of each method that was asked about
    speedups: Mapping[str, float]


def select_method(ladder: Ladder, acceptance: Mapping[str, float]) -> Selection:
    """Initial selection: the method with the largest speed-up at its own historic acceptance.

    Args:
        acceptance: method -> share of its tokens that were accepted so far. Methods without history are left out.

    Raises:
        ConfigError: no method, or one that the ladder lacks.
    """
    if not acceptance:
        raise ConfigError("no method has an acceptance", "give one of at least one method")
    found = {method: ladder.speedup(method, rate) for method, rate in acceptance.items()}
    best = max(found, key=found.__getitem__)
    return Selection(best, found[best], found) if found[best] > 1.0 else Selection(None, 1.0, found)


def build_ladder(
    methods: Mapping[str, AffineTime],
    verify: AffineTime,
    *,
    batch: int = 1,
    mode: Mode = Mode.COUPLED,
    acceptance: Sequence[float] = GRID,
    max_window: int = MAX_WINDOW,
    rng: np.random.Generator | None = None,
    draws: int = DRAWS,
) -> Ladder:
    """The ladder from what drafting and verifying take.

    Args:
        methods: name -> D(b). Prompt lookup has a D near 0.
        verify: V(b, w).
        rng: draws accepted tokens beside the formula; None leaves that out.

    Raises:
        ConfigError: a value out of range.
    """
    if mode is Mode.PLAIN or batch < 1 or max_window < 1 or draws < 1:
        raise ConfigError(
            f"a ladder for mode {mode}, batch {batch}, windows up to {max_window} and {draws} draws",
            "choose coupled or decoupled, and 1 or more",
        )
    rate = coupled_rate if mode is Mode.COUPLED else decoupled_rate
    plain = plain_rate(verify, batch)
    rungs = []
    for name, draft in methods.items():
        windows, speedups, drawn = [], [], []
        for p in acceptance:
            rates = [rate(draft, verify, batch, window, p) for window in range(1, max_window + 1)]
            best = int(np.argmax(rates))
            windows.append(best + 1)
            speedups.append(rates[best] / plain)
            if rng is not None:
                drawn.append(drawn_rate(draft, verify, batch, best + 1, p, mode, rng, draws) / plain)
        rungs.append(Rung(name, tuple(windows), tuple(speedups), tuple(drawn)))
    return Ladder(batch, mode, tuple(acceptance), tuple(rungs))


def drawn_rate(
    draft: AffineTime,
    verify: AffineTime,
    batch: int,
    window: int,
    match_rate: float,
    mode: Mode,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> float:
    """Tokens per millisecond of a request whose drafted tokens are marked accepted or rejected at random.

    Decoupled, the others of the batch are taken to have their mean number of drafts in every step.
    """
    if mode is Mode.COUPLED:
        matches = rng.random((draws, window)) < match_rate
        tokens = float(np.cumprod(matches, axis=1).sum() + draws)
        return tokens / (draws * (window * draft.ms(batch) + verify.ms(batch, window)))
    others = shared_stream(draft, verify, batch, window, match_rate).drafts
    # tokens up to a miss and with the one that replaces it, of many runs
    runs = rng.geometric(max(1.0 - match_rate, 1e-4), draws)
    sizes, times = _run_times(window, window * draft.ms(batch), step_time(verify, batch, others), int(runs.max()))
    return float(runs.sum() / times[np.searchsorted(sizes, runs)].sum())


def _run_times(window: int, window_ms: float, step_ms: StepTime, most: int) -> tuple[Floats, Floats]:
    """[steps] tokens after each step without a miss, until there are `most`, and milliseconds until then."""
    steps, known = [], 0
    for drafts, ms in timetable(window, window_ms, step_ms):
        steps.append((drafts + 1, ms))
        known += drafts + 1
        if known >= most:
            break
    sizes, times = np.cumsum(np.asarray(steps, dtype=np.float64), axis=0).T
    return sizes, times


def load_ladder(path: Path) -> Ladder:
    """Read what `Ladder.save` wrote.

    Raises:
        ConfigError: it cannot be read, or is no ladder.
    """
    way = "build one with `specrollout plan ladder --out FILE`"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` cannot be read as JSON: {error}", way) from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise ConfigError(f"`{path}` is no ladder of format {_FORMAT}", way)
    try:
        rungs = tuple(_read_rung(rung) for rung in body["rungs"])
        return Ladder(_whole(body["batch"]), Mode(body["mode"]), _reals(body["acceptance"]), rungs)
    except (KeyError, TypeError, ValueError) as error:
        cause = error.cause if isinstance(error, ConfigError) else repr(error)
        raise ConfigError(f"`{path}` is damaged: {cause}", way) from None


def _read_rung(rung: Mapping[str, Any]) -> Rung:
    method = rung["method"]
    if not isinstance(method, str):
        raise TypeError(f"a method is {method!r}, no name")
    windows = tuple(_whole(window) for window in rung["windows"])
    return Rung(method, windows, _reals(rung["speedups"]), _reals(rung["drawn"]))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"{value!r} is no whole number above 0")
    return value


def _reals(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise TypeError(f"{values!r} is no list of numbers")
    return tuple(map(float, values))
