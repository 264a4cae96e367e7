"""Guard: a failure of ours costs speed, never tokens. It is contained here, counted, and logged once.

What belongs here: what counts as a failure, and who is told. Whoever uses a guard says what happens instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_specrollout.config import envs
from vllm_specrollout.errors import logger

CONTAINED = (Exception, SystemExit)
"""Whatever a part of ours may raise; a library that ends the process on an error is one of the cases."""


class Guard:
    """Contains the failures of one engine's drafting.

    Args:
        is_strict: failures are raised instead, as tests want it; None: as the environment says (`envs.STRICT`).
    """

    def __init__(self, is_strict: bool | None = None) -> None:
        self.is_strict = envs.is_strict() if is_strict is None else is_strict
        # part -> how often it failed
        self.failures: dict[str, int] = {}
        # told the part's name at every failure
        self.listener: Callable[[str], None] | None = None
        self._is_telling = False

    @contextmanager
    def over(self, part: str, effect: str) -> Iterator[None]:
        """A block of code whose failure leaves it early, and nothing else; see `failed`.

        What is entered in every step has a plain `try` instead, which costs nothing where all goes well.
        """
        try:
            yield
        except CONTAINED as error:
            self.failed(part, error, effect)

    def failed(self, part: str, error: BaseException, effect: str, *, is_last: bool = False) -> None:
        """Count a failure, and name it if it is the part's first.

        Args:
            part: what failed: a drafter's name, or a word of the code's own. There are few of them.
            effect: what comes of it, as the second half of a sentence.
            is_last: it is named whatever was before: nothing more will be heard of the part.

        Raises:
            the error itself, where the guard is strict.
        """
        count = self.failures[part] = self.failures.get(part, 0) + 1
        if self.is_strict:
            raise error
        if count == 1 or is_last:
            logger.error("Spec rollout: %s failed; %s", part, effect, exc_info=error)
        if self.listener is not None and not self._is_telling:
            # whoever fails at being told of a failure is counted, and not told of that as well
            self._is_telling = True
            try:
                self.listener(part)
            finally:
                self._is_telling = False
