"""Requests of the self-check: decoded plainly first, then once more with drafts of what came out.

They go through the runner's own steps, with a schedule made by hand, as those of vLLM's warm-up do. Drafts are the
tokens that plain decoding sampled, with wrong siblings before them, so that what is accepted has to be moved. Plain
steps follow, which read what was moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_specrollout.kernels.kv_commit.naive import kv_commit as naive_commit
from vllm_specrollout.kernels.tree_verify.naive import noise32, noise64, philox_noise32
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.self_check import tolerance
from vllm_specrollout.types import Answer, DraftMode
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.v2.attention import ShadowedAttention, attention_layers
from vllm_specrollout.worker.v2.host import Host, HostRequest

_SHORT, _LONG = 12, 600
"""Tokens of prompts: so few that each key weighs, and so many that FlashAttention splits them."""
_DEPTH, _STEPS_AFTER = 4, 3
_PLAIN_STEPS = _DEPTH + 1 + _STEPS_AFTER
"""Tokens behind the first that are decoded plainly: a draft's, its bonus token, and those of the steps after it."""

_MOST = 4 * _PLAIN_STEPS
"""Tokens that a request may have behind its prompt."""

Draft = tuple[list[int], list[int]]
"""Tokens of the nodes, and their parents; -1 is the root."""


def chain_of(tokens: Sequence[int], vocab: int) -> Draft:
    """These tokens, and a wrong one in the last one's place."""
    drafted = [*tokens[:-1], (tokens[-1] + 1) % vocab] if len(tokens) > 1 else list(tokens)
    return drafted, list(range(-1, len(drafted) - 1))


def fork_of(tokens: Sequence[int], vocab: int) -> Draft:
    """These tokens, each behind a wrong sibling."""
    drafted = [sibling for token in tokens for sibling in ((token + 1) % vocab, token)]
    return drafted, [2 * (i // 2) - 1 for i in range(len(drafted))]


class _Deaf:
    """Stands in for the speculator: nobody learns from these requests."""

    def __init__(self) -> None:
        self.guard = Guard(is_strict=False)

    def finish(self, ending: Answer) -> None:
        """It was never begun."""


class Scripted(Drafting):
    """Plans nothing: what is drafted is given to the device by hand."""

    def __init__(self) -> None:
        super().__init__(_Deaf())  # type: ignore[arg-type]
        self.withheld.end()

    def look_ahead(self, *args: Any) -> None:
        return None

    def is_paused(self, *args: Any) -> bool:
        return False

    def steps_off(self, *args: Any) -> int:
        return 0

    def _unheard(self, *args: Any) -> None:
        """There is nobody to tell."""

    admit = forget = begin = observe = timed = _unheard


@dataclass(slots=True)
class CheckedRequest:
    """One request, and what plain decoding made of it."""

    prompt: list[int]
    params: SamplingParams
    # per group of layers, its blocks
    blocks: tuple[list[int], ...]
    tokens: list[int] = field(default_factory=list)
    # [vocab] logits of each token
    logits: list[torch.Tensor] = field(default_factory=list)


class CheckRequests:
    """Requests, greedy and seeded, short and long, on blocks that nobody has yet."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.drafting = Scripted()
        self.host = Host(self.drafting, runner.max_model_len)
        self.depth = min(_DEPTH, runner.max_draft_tokens, runner.spec_config.max_depth)
        self.lines: list[CheckedRequest] = []
        self._num_blocks = 1
        self._pass = 0

    def _lay_out(self) -> None:
        """As many requests, and as long ones, as there is room for."""
        runner = self.runner
        most = min(runner.max_model_len, runner.max_num_tokens // 2) - _MOST
        draw = np.random.default_rng(0)
        for number, length in enumerate((_SHORT, min(_LONG, most - _SHORT), _SHORT, min(_LONG, most - _SHORT))):
            length = max(length, min(8, most))
            sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
            counts = [-(-(length + _MOST) // size) for size in sizes]
            rows = sum(len(line.prompt) for line in self.lines) + length
            has_room = self._num_blocks + sum(counts) <= runner.kv_cache_config.num_blocks
            if number == runner.max_num_reqs or rows > runner.max_num_tokens or not has_room or length < 1:
                break
            params = SamplingParams(
                temperature=float(number % 2), seed=1000 + number, max_tokens=_MOST, ignore_eos=True
            )
            prompt = draw.integers(0, runner.vocab_size, length).tolist()
            self.lines.append(CheckedRequest(prompt, params, tuple(self._take(count) for count in counts)))

    def _take(self, count: int) -> list[int]:
        self._num_blocks += count
        return list(range(self._num_blocks - count, self._num_blocks))

    def clear(self) -> None:
        """Nothing is left in the caches."""
        for cache in self.runner.kv_caches if self._pass else ():
            cache.zero_()

    # --- what is compared --------------------------------------------------------------------------------------------

    def decode(self) -> str:
        """Remember what plain decoding samples."""
        self._lay_out()
        if not self.lines:
            return "there is no room for a request in the KV cache"
        stock, kept = self.runner.model.compute_logits, []

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            kept.append(stock(hidden))
            return kept[-1]

        self.runner.model.compute_logits = keep
        try:
            for number in range(1 + _PLAIN_STEPS):
                order = self._step({}) if number else self._begin()
                for row, name in enumerate(order):
                    self.lines[_number(name)].logits.append(kept[-1][row].clone())
                kept.clear()
        finally:
            del self.runner.model.compute_logits
        for number, line in enumerate(self.lines):
            line.tokens = self._sampled(number)
        self.end()
        return ""

    def compare(self, shape: DraftMode, graphs: Any = None) -> str:
        """What differs once everybody but the last request is drafted for; nothing: "".

        Args:
            shape: that of the drafts.
            graphs: the graphs that steps with branches replay; None: none.
        """
        drafts = self._drafts(fork_of if shape is DraftMode.TREE else chain_of, self.lines[:-1] or self.lines)
        runner = self.runner
        kept = runner.shape, runner.draft_graphs.trees
        runner.shape, runner.draft_graphs.trees = (shape, ""), graphs
        try:
            self._begin()
            self._step(drafts)
            counts = {number: len(self._sampled(number)) - 1 for number in drafts}
            for _ in range(_STEPS_AFTER):
                self._step({})
        finally:
            runner.shape, runner.draft_graphs.trees = kept
        answers = [self._sampled(number) for number in range(len(self.lines))]
        self.end()
        for number, answer in enumerate(answers):
            is_tie, wrong = self._differs(number, answer)
            if wrong:
                return wrong
            right = self._right(drafts[number], number) if number in drafts else 0
            if number in drafts and not is_tie and counts[number] != right + 1:
                return f"request {number}: {counts[number] - 1} of {right} right draft tokens were accepted"
        return ""

    def shadow(self) -> str:
        """How far attention of a step with branches is from its specification."""
        layers, found = list(attention_layers(self.runner)), []
        kept = [layer.impl for layer in layers]
        for layer in layers:
            layer.impl = ShadowedAttention(layer.impl, found)
        try:
            self._fork()
        finally:
            for layer, impl in zip(layers, kept, strict=True):
                layer.impl = impl
        if not found:
            return "no layer attended to branches"
        off, most = max(found, key=lambda pair: pair[0] / pair[1])
        return "" if off <= most else f"attention is off by {off:.2g}, at most {most:.2g}"

    def move(self) -> str:
        """What of a step's accepted keys and values is not moved as its specification moves it."""
        runner, mover = self.runner, self.runner.mover
        wrong: list[int] = []
        steps = []

        def move(*told: torch.Tensor) -> None:
            copies = [cache[: self._num_blocks].clone() for cache in runner.kv_caches]
            mover.move(*told)
            naive_commit(copies, *told)
            caches = [cache[: self._num_blocks].contiguous() for cache in runner.kv_caches]
            both = enumerate(zip(caches, copies, strict=True))
            wrong.extend(i for i, pair in both if not torch.equal(*(one.view(torch.uint8) for one in pair)))
            steps.append(told)

        runner.mover = SimpleNamespace(move=move)
        try:
            self._fork()
        finally:
            runner.mover = mover
        if not steps:
            return "a step with branches moved nothing"
        return f"accepted keys and values of layer {wrong[0]} are not where they belong" if wrong else ""

    def _fork(self) -> None:
        """One step in which everybody has branches, without graphs."""
        kept, self.runner.draft_graphs.trees = self.runner.draft_graphs.trees, None
        try:
            self._begin()
            self._step(self._drafts(fork_of, self.lines))
        finally:
            self.runner.draft_graphs.trees = kept
        self.end()

    def _drafts(self, draft: Any, lines: Sequence[CheckedRequest]) -> dict[int, Draft]:
        most, vocab = self.runner.max_draft_tokens, self.runner.vocab_size
        drafts = {number: draft(line.tokens[1 : 1 + self.depth], vocab) for number, line in enumerate(lines)}
        return {number: (tokens[:most], parents[:most]) for number, (tokens, parents) in drafts.items()}

    def _right(self, draft: Draft, number: int) -> int:
        """Draft tokens that plain decoding samples."""
        tokens, parents = draft
        row, count = -1, 0
        while True:
            child = [i for i, above in enumerate(parents) if above == row]
            row = next((i for i in child if tokens[i] == self.lines[number].tokens[1 + count]), -1)
            if row < 0:
                return count
            count += 1

    def _differs(self, number: int, answer: Sequence[int]) -> tuple[bool, str]:
        """Whether the answer parts from plain decoding's at a tie; and how it parts from it otherwise."""
        line = self.lines[number]
        for i, (wanted, found) in enumerate(zip(line.tokens, answer, strict=False)):
            if wanted == found:
                continue
            apart, most = self._apart(line, i, wanted, found)
            if apart <= most:
                return True, ""
            return False, f"request {number}: token {found} for {wanted} at {i}, {apart:.2g} apart (tie: {most:.2g})"
        return False, ""

    def _apart(self, line: CheckedRequest, at: int, wanted: int, found: int) -> tuple[float, float]:
        """How far apart two tokens were, and how far apart a tie may be."""
        logits = line.logits[at].float()
        pair = [float(logits[wanted]), float(logits[found])]
        scores = list(pair)
        if line.params.temperature:
            verifier = self.runner.verifier
            draw: Any = noise64 if verifier.sampler.use_fp64_gumbel else noise32
            draw = philox_noise32 if verifier.is_philox else draw
            noise = draw(line.params.seed, len(line.prompt) + at - 1, len(logits))
            scores = [pair[0] + float(noise[wanted]), pair[1] + float(noise[found])]
        dtype = str(line.logits[at].dtype).removeprefix("torch.")
        return abs(scores[0] - scores[1]), tolerance(dtype, pair)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin(self) -> list[str]:
        """Prefill the prompts, of requests that are new to the engine."""
        self.end()
        self._pass += 1
        output = SchedulerOutput.make_empty()
        for number, line in enumerate(self.lines):
            request = Request(self._name(number), line.prompt, line.params, None)
            new = NewRequestData.from_request(request, block_ids=line.blocks, prefill_token_ids=line.prompt)
            output.scheduled_new_reqs.append(new)
            output.num_scheduled_tokens[new.req_id] = len(line.prompt)
        return self._run(output)

    def _name(self, number: int) -> str:
        return f"self-check-{self._pass}-{number}"

    def _sampled(self, number: int) -> list[int]:
        request = self.host.get(self._name(number))
        return [] if request is None else request.buffer[len(self.lines[number].prompt) : request.length].tolist()

    def _step(self, drafts: Mapping[int, Draft]) -> list[str]:
        """One decode step of all requests, with these drafts."""
        output, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
        for number in range(len(self.lines)):
            name = self._name(number)
            request = self.host.get(name)
            assert isinstance(request, HostRequest)
            cached.req_ids.append(name)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(request.length - 1)
            cached.num_output_tokens.append(request.length - request.num_prompt)
            room = len(drafts[number][0]) if number in drafts else 0
            output.num_scheduled_tokens[name] = 1 + room
            if room:
                output.scheduled_spec_decode_tokens[name] = [-1] * room
        output.scheduled_cached_reqs = cached
        for number, (tokens, parents) in drafts.items():
            self.runner.drafts.put(self._name(number), tokens, parents)
        return self._run(output)

    def _run(self, output: SchedulerOutput) -> list[str]:
        """Returns the requests in the order of the step's rows."""
        runner = self.runner
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        runner.execute_model(output)
        order = list(runner.execute_model_state.input_batch.req_ids)
        runner.sample_tokens(None)
        runner.settle()
        return order

    def end(self) -> None:
        """The requests that run are over."""
        names = {self._name(number) for number in range(len(self.lines))} & set(self.runner.req_states.req_id_to_index)
        if names:
            output = SchedulerOutput.make_empty()
            output.finished_req_ids = names
            self.runner.execute_model_state = None
            self.runner.execute_model(output)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
