"""How fast a request's answer grows: plain, coupled, and decoupled as SpecActor models it.

Source: SpecActor, section 4.1. What belongs here: closed formulas. A verifier that never waits is in timetable.py.

Each drafted token matches the target's with probability p in its turn. All rates are tokens per millisecond of one
request; all of a batch's requests go at the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_specrollout.config.checks import check_real
from vllm_specrollout.decoupled.times import Time
from vllm_specrollout.errors import ConfigError

MOST = 1.0 - 1e-9
"""Match rates above count as this: the formulas have p = 1 as their limit, not as a value."""


class Mode(StrEnum):
    """How a request is drafted for."""

    PLAIN = "plain"
    COUPLED = "coupled"
    DECOUPLED = "decoupled"


@dataclass(frozen=True, slots=True)
class Exits:
    """What is drafted beside the stream, for when the target leaves it.

    Raises:
        ConfigError: a value out of range.
    """

    # that the token which replaces a miss is among the alternatives
    probability: float = 0.0
    # alternatives at each place
    width: int = 0
    # what a window takes with the continuations behind them, over what it takes without
    draft_factor: float = 1.0

    def __post_init__(self) -> None:
        check_real("exits", self.probability, 0, 1)
        if self.width < 0 or not 1.0 <= self.draft_factor < float("inf"):
            raise ConfigError(
                f"exits of width {self.width} with a draft factor of {self.draft_factor}",
                "give a width of 0 or more and a factor of 1 or more",
            )


NO_EXITS = Exits()


def tokens_per_window(match_rate: float, window: int, balance: float = 1.0) -> float:
    """Tokens per period max(w D, V) when the verifier waits for windows; by renewal, so exact.

    A whole window of matches yields w tokens in one period, as the next one was drafted meanwhile. Any other yields the
    a matches and the target's own token, and lasts w D + V: the window drafted meanwhile is lost.

        tau = [sum p^a (1 - p) (a + 1) + w p^w] / [(1 - p^w) (1 + balance) + p^w]

    Args:
        match_rate: p.
        window: w, 1 or more.
        balance: the shorter of w D and V over the longer one. At 1 a partly accepted window lasts two periods.

    Raises:
        ConfigError: a value out of range.
    """
    check_real("balance", balance, 0, 1)
    p, whole = _checked(match_rate, window)
    return (1.0 - whole) / (1.0 - p) / ((1.0 - whole) * (1.0 + balance) + whole)


def printed_tokens_per_window(match_rate: float, window: int) -> float:
    """tau_w as SpecActor prints it: sum p^a (1 - p) (a + 1) / 2 + w p^w.

    It averages tokens per period over windows. But a partly accepted window lasts two periods, so it counts twice in
    time. The printed value is 17 to 26 % above the exact one for usual p and w, and never below it.
    """
    p, whole = _checked(match_rate, window)
    return 0.5 * (1.0 - whole) / (1.0 - p) + 0.5 * window * whole


def plain_rate(verify: Time, batch: int) -> float:
    """One token per step."""
    return 1.0 / verify.ms(batch)


def coupled_rate(
    draft: Time, verify: Time, batch: int, window: int, match_rate: float, exits: Exits = NO_EXITS
) -> float:
    """Draft w tokens, then verify them in w + 1 rows: (1 - p^(w+1)) / (1 - p) tokens in w D + V.

    The paper leaves this model out. Exits are verified beside the chain, `exits.width` at each of the w places. One
    that is hit yields the target's token behind it as well.
    """
    p, whole = _checked(match_rate, window)
    tokens = (1.0 - p * whole) / (1.0 - p) + exits.probability * (1.0 - whole)
    return tokens / (window * draft.ms(batch) + verify.ms(batch, window * (1 + exits.width)))


def waiting_rate(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> float:
    """Decoupled, and the verifier waits for a whole window; exact. A window is verified in w rows."""
    period, balance = _period(draft, verify, batch, window)
    return tokens_per_window(match_rate, window, balance) / period


def printed_rate(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> float:
    """TGS as SpecActor prints it, with its tau_w, whatever the balance."""
    return printed_tokens_per_window(match_rate, window) / _period(draft, verify, batch, window)[0]


def _checked(match_rate: float, window: int) -> tuple[float, float]:
    """p below 1, and p^w."""
    if window < 1:
        raise ConfigError(f"a window is {window} tokens long", "draft 1 token or more")
    check_real("match_rate", match_rate, 0, 1)
    p = min(match_rate, MOST)
    return p, p**window


def _period(draft: Time, verify: Time, batch: int, window: int) -> tuple[float, float]:
    """max(w D, V), and the shorter one over the longer one."""
    drafting, verifying = window * draft.ms(batch), verify.ms(batch, window - 1)
    period = max(drafting, verifying)
    return period, min(drafting, verifying) / period
