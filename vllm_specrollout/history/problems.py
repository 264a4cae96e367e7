"""Problem of a request whose client does not name one. Pure: tokens in, ids out; no clock, no chance.

In this order: the id that the client gives; the id of an equal prompt, which samples of one group have; that of the
prompt which a longer one goes on from, behind an answer to it (an interrupted answer that is asked for again, the next
turn of a conversation); that of the session. Else the prompt is a problem of its own. A wrong guess costs speed only,
never tokens. But drafts tell how others' answers went on, to whoever measures time. So requests of different
`cache_salt`s or lines of adapters share a problem only where their clients give it one id.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import IntArray

MOST_PROMPTS = 16_384
"""Prompts remembered, and sessions; those seen least recently go first. Whatever has requests that run is kept."""
MOST_TOKENS = 1 << 22
"""Tokens of answers remembered that have ended, 4 bytes each; the oldest go first."""
MOST_COMPARED = 1024
"""Answers that one arrival is compared with: of those that ended, and as many of those that run."""
_EACH = 32  # tokens that an answer counts for beside its own: what Python adds to it

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Attribution:
    """Whose answer a request's is."""

    problem_id: str
    continues: bool = False
    """Whether it goes on from an earlier request, so that its problem did not come back with it."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt, and the answers to it."""

    name: str
    found: Attribution
    num_tokens: int
    key: tuple[int, int, bytes]
    # by request: grows while the request runs
    live: dict[str, Sequence[int]] = field(default_factory=dict)
    # oldest first, each [num_tokens] int32
    ended: deque[IntArray] = field(default_factory=deque)
    # requests that ended without a token: as many are asked for again
    unanswered: int = 0

    def answers(self, most_tokens: int, most: int) -> Iterator[IntArray]:
        """At most so many of those that ended, latest first, for that is what is gone on from; and as many that run.

        Of running ones the oldest, which have tokens sooner than those that wait; at most their first tokens.
        """
        yield from itertools.islice(reversed(self.ended), most)
        for answer in itertools.islice(self.live.values(), most):
            yield np.asarray(answer[:most_tokens], dtype=np.int32)


class Problems:
    """Attributes requests, one after the other. It takes time in proportion to the prompt, however much is known."""

    def __init__(self, most_prompts: int = MOST_PROMPTS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_prompts, self._most_tokens = most_prompts, most_tokens
        # by name
        self._prompts: dict[str, _Prompt] = {}
        # the names of those that no request runs for; the one that waits longest first
        self._idle: OrderedDict[str, None] = OrderedDict()
        # by length, the word that stands for the tokens, and what keeps apart; equal words are looked at again
        self._by_key: dict[tuple[int, int, bytes], str] = {}
        self._lengths: Counter[int] = Counter()
        self._sorted_lengths: list[int] = []
        # running requests -> their prompt
        self._running: dict[str, _Prompt] = {}
        # by what stands for the session's name, and what keeps apart
        self._sessions: OrderedDict[tuple[bytes, bytes], str] = OrderedDict()
        # of the answers that have ended: whose, oldest first
        self._ended: deque[_Prompt] = deque()
        self.num_tokens = 0
        """Of the answers that have ended, and what each of them adds."""

    def __len__(self) -> int:
        return len(self._prompts)

    def arrive(
        self,
        request_id: str,
        prompt: Sequence[int] | None,
        answer: Sequence[int] = (),
        *,
        given: str = "",
        session_id: str | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> Attribution:
        """Attribute a request.

        Args:
            prompt: its token ids; None: it has none.
            answer: what it generates; grows in place while the request runs. What is there already was begun elsewhere.
            given: the id that the client gives.
            session_id: of the session that the client names.
            salt: the request's `cache_salt`.
            adapter: the LoRA adapter's name.
        """
        if not prompt:
            return Attribution(given)
        self.end(request_id)
        # clients may give names of any length: none is kept
        apart = _word(f"{len(salt)}:{salt}{policy_line(adapter)}") if salt or adapter else b""
        session = (_word(session_id), apart) if session_id else None
        name = prompt_hash(prompt, apart)
        known = self._prompts.get(name)
        if known is None or (given and known.found.problem_id != given):
            known = self._remember(name, prompt, given, session, apart)
        self._idle.pop(name, None)
        is_again = known.unanswered > 0
        known.unanswered -= is_again
        known.live[request_id] = answer
        self._running[request_id] = known
        if session is not None:
            self._sessions[session] = known.found.problem_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._most_prompts:
                self._sessions.popitem(last=False)
        return Attribution(known.found.problem_id, known.found.continues or is_again or bool(answer))

    def end(self, request_id: str) -> None:
        """The request is over, however it ended. Unknown ones are none of ours."""
        prompt = self._running.pop(request_id, None)
        if prompt is None:
            return
        answer = np.array(prompt.live.pop(request_id), dtype=np.int32)
        prompt.unanswered += not answer.size
        if answer.size:
            self._keep(prompt, answer)
        if not prompt.live:
            self._idle[prompt.name] = None
            self._forget_surplus()

    def _keep(self, prompt: _Prompt, answer: IntArray) -> None:
        prompt.ended.append(answer)
        self._ended.append(prompt)
        self.num_tokens += answer.size + _EACH
        while self.num_tokens > self._most_tokens:
            # a prompt's answers are in this order too
            self.num_tokens -= self._ended.popleft().ended.popleft().size + _EACH

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _remember(
        self, name: str, prompt: Sequence[int], given: str, session: tuple[bytes, bytes] | None, apart: bytes
    ) -> _Prompt:
        tokens = np.asarray(prompt, dtype=np.int32)
        words = _words_of(tokens)
        before = self._continued(tokens, words, apart)
        of_session = self._sessions.get(session) if session is not None else None
        if before is not None and given in ("", before.found.problem_id):
            found = Attribution(before.found.problem_id, continues=True)
        elif given or of_session is None:
            found = Attribution(given or name)
        else:
            found = Attribution(of_session, continues=True)
        known = self._prompts.get(name)
        if known is not None:
            # another client gives it another id; its answers stay
            known.found = found
            return known
        known = self._prompts[name] = _Prompt(name, found, tokens.size, (tokens.size, int(words[-1]), apart))
        self._by_key[known.key] = name
        if not self._lengths[known.num_tokens]:
            bisect.insort(self._sorted_lengths, known.num_tokens)
        self._lengths[known.num_tokens] += 1
        self._forget_surplus()
        return known

    def _continued(self, tokens: IntArray, words: Words, apart: bytes) -> _Prompt | None:
        """The longest known prompt that these tokens begin with, and then go on as one of its answers does."""
        # the scheduler waits meanwhile, and whoever sends requests chooses how many answers there are
        left = MOST_COMPARED
        for length in reversed(self._sorted_lengths[: bisect.bisect_left(self._sorted_lengths, tokens.size)]):
            name = self._by_key.get((length, int(words[length - 1]), apart))
            known = self._prompts.get(name) if name is not None else None
            if known is None:
                continue
            rest = tokens[length:]
            # what is as long as the rest, and no longer, may be the whole of the answer
            is_next = any(_goes_on(rest, answer) for answer in known.answers(rest.size + 1, left))
            if is_next and prompt_hash(tokens[:length], apart) == name:
                return known
            left -= len(known.ended) + len(known.live)
            if left <= 0:
                break
        return None

    def _forget_surplus(self) -> None:
        """Drop prompts beyond the limit; none that a request runs for, nor one that has just come."""
        while len(self._prompts) > self._most_prompts and self._idle:
            name, _ = self._idle.popitem(last=False)
            prompt = self._prompts.pop(name)
            if self._by_key.get(prompt.key) == name:
                del self._by_key[prompt.key]
            self._lengths[prompt.num_tokens] -= 1
            if not self._lengths[prompt.num_tokens]:
                del self._lengths[prompt.num_tokens]
                self._sorted_lengths.remove(prompt.num_tokens)


def policy_line(adapter: str) -> str:
    """What an adapter's name has in common with those of its later versions: trainers number each (`policy-17`)."""
    return re.sub("[0-9]+", "0", adapter)


def prompt_hash(prompt_token_ids: Sequence[int] | IntArray | None, apart: bytes = b"") -> str:
    """The default problem id: requests with the same prompt have the same one.

    Args:
        apart: 16 bytes or none; requests of another one have other ids.
    """
    if prompt_token_ids is None or not len(prompt_token_ids):
        return ""
    content = np.asarray(prompt_token_ids, dtype=np.int64).tobytes()
    # a parameter of the hash's own, so that the two cannot run together
    return hashlib.blake2b(content, digest_size=12, salt=apart).hexdigest()


def _word(name: str) -> bytes:
    """16 bytes for a name of any length."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _goes_on(rest: IntArray, answer: IntArray) -> bool:
    """Whether tokens are the beginning of an answer, or begin with the whole of it; its last one may be missing.

    (Chat templates put another token in the place of the one that ends an answer.)
    """
    count = min(rest.size, answer.size)
    if not count or rest[0] != answer[0]:
        return False
    same = rest[:count] == answer[:count]
    return bool(same.all()) or (rest.size > answer.size > 1 and bool(same[:-1].all()))


_factors = np.zeros(0, dtype=np.uint64)


def _words_of(tokens: IntArray) -> Words:
    """[num_tokens] a word for every beginning of the tokens: the sum of each token times its position's own factor."""
    global _factors
    if len(_factors) < tokens.size:
        _factors = _mixed(np.arange(max(tokens.size, 2 * len(_factors)), dtype=np.uint64))
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _factors[: tokens.size], dtype=np.uint64)


def _mixed(numbers: Words) -> Words:
    """The numbers' bits, well mixed (splitmix64): the same on every host."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
