"""A group of engines on one host that share batches: what a trainer holds."""

from __future__ import annotations

import json
import operator
import random
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from vllm_specrollout.cluster.group.channel import ZmqHub, wait
from vllm_specrollout.cluster.group.coordinator import MODES, Rules
from vllm_specrollout.cluster.group.dealing import Answer, Ask, Dealer, GroupError
from vllm_specrollout.cluster.group.member import BEAT_S
from vllm_specrollout.cluster.group.messages import LIMIT, Call, Here
from vllm_specrollout.cluster.group.processes import CoordinatorProcess, begin_worker, end, shares_of
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.errors import ConfigError, shown

LADDERS = ("off", *MODES)
_GREEDY = 1e-5
_POLL_S = 0.05


class RolloutGroup:
    """Engines in processes of their own, which share each batch, and help each other at its end.

    Use it as a context, or call `close`.

    Args:
        model: folder or name.
        cores: the CPU cores of each worker, as `[[0, 1], [2, 3]]`; a number: so many workers on equal shares of all.
        engine: further arguments of `vllm.LLM`; `max_num_seqs` is the most requests that a worker runs at once.
        spec_rollout: drafting, as `LLM` takes it.
        ladder: `off`; `race`: an idle worker runs others' requests as well, with another drafting method; `attach`: the
            drafter on an idle worker's cores drafts for others' requests.
        methods: for racing, names of the engine's drafters, best first.
        most: requests of others that one worker helps with.
        drafter: for attaching: the model that drafts, warm on each worker's cores; of several, the workers have one in
            turns, and a straggler may get one of each.
        drafter_engine: arguments of its engine.
        patience_s: seconds without a word after which a worker is ended, and others get its requests.
        start_s: seconds that the engines may take to start.
        seed: of the seeds that requests without one get.

    Raises:
        ConfigError: something cannot be used.
        GroupError: a worker did not start.
    """

    def __init__(
        self,
        model: str,
        *,
        cores: int | Sequence[Sequence[int]] = 2,
        engine: Mapping[str, Any] | None = None,
        spec_rollout: bool | Mapping[str, Any] = True,
        ladder: str = "off",
        methods: Sequence[str] = ("history", "ngram"),
        most: int = 4,
        drafter: str | Sequence[str] = "",
        drafter_engine: Mapping[str, Any] | None = None,
        patience_s: float = 120.0,
        start_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        shares = shares_of(cores)
        models = [drafter] if isinstance(drafter, str) else list(drafter)
        drafters = [models[i % len(models)] for i in range(len(shares))] if any(models) else []
        rules = _rules(ladder, methods, most, drafter)
        check_range("patience_s", patience_s, 1.0, 86400.0)
        if not spec_rollout:
            raise ConfigError(
                "`spec_rollout` is off, and without it no request can go on elsewhere",
                'set {"budget": "off"} to decode plainly',
            )
        self.places: dict[str, int] = {}
        """Worker -> requests that it runs at once, of the workers that are there."""
        self.resubmitted = self.disagreements = 0
        """Of all batches so far: see `Dealer`."""
        self._patience_s, self._rng, self._batches = patience_s, random.Random(seed), 0
        # calls so far, and when the next one is due; workers answer them, since between two batches nobody listens
        self._called, self._call_at = 0, 0.0
        # worker -> calls before its last word; a driver that stood still itself has called nobody
        self._heard: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="specrollout-")
        self._hub = ZmqHub(self._address("driver"))
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._coordinator: CoordinatorProcess | None = None
        self._warm: Any = None
        try:
            if drafters:
                self._begin_drafters(drafters, shares, drafter_engine or {}, _most_nodes(spec_rollout))
            if rules is not None:
                self._coordinator = CoordinatorProcess(self._address("coordinator"), rules)
            arguments = {**(engine or {}), "model": model, "spec_rollout": spec_rollout}
            for i, share in enumerate(shares):
                name = f"worker-{i}"
                self._workers[name] = begin_worker(
                    name,
                    share,
                    arguments,
                    driver=self._address("driver"),
                    coordinator=self._address("coordinator") if rules is not None else "",
                    drafter=self._address(f"drafter-{i}") if drafters else "",
                    drafter_model=drafters[i] if drafters else "",
                )
            self._await_workers(start_s)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    ) -> list[Answer]:
        """Answer all prompts.

        Args:
            prompt_token_ids: [R] prompts of token ids.
            sampling_params: arguments of `SamplingParams`, for all prompts or [R] one for each. `n` is 1. `logprobs` is
                unset, or 0 for those of the tokens themselves.

        Returns:
            [R] the answers, in the prompts' order.

        Raises:
            ConfigError: token ids or parameters that cannot be used.
            GroupError: an engine refused a request, or no worker is left.
        """
        asks = self._asks(prompt_token_ids, sampling_params)
        dealer = Dealer(asks, self._called)
        for name, places in self.places.items():
            dealer.take(name, Here(places))
            self._heard[name] = self._called
        try:
            while not dealer.is_done:
                self._listen(dealer)
                self._watch(dealer)
                self._call(dealer)
                for name, message in dealer.due():
                    self._hub.send(name, message)
                if not dealer.is_done:
                    wait([self._hub], _POLL_S)
        finally:
            for name, message in dealer.leave():
                self._hub.send(name, message)
            self.resubmitted += dealer.resubmitted
            self.disagreements += dealer.disagreements
        return [dealer.answers[ask.request] for ask in asks]

    def close(self) -> None:
        """End all processes."""
        processes = list(self._workers.values())
        if self._coordinator is not None:
            processes.append(self._coordinator.process)
        end(processes)
        if self._warm is not None:
            self._warm.stop()
        self._hub.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    def _address(self, name: str) -> str:
        return f"ipc://{Path(self._folder.name) / name}"

    def _begin_drafters(
        self,
        models: Sequence[str],
        shares: Sequence[Sequence[int]],
        engine: Mapping[str, Any],
        most_nodes: int | None,
    ) -> None:
        from vllm_specrollout.cluster.child import Command
        from vllm_specrollout.cluster.warm import WarmPool

        commands = {
            f"worker-{i}": Command(model, self._address(f"drafter-{i}"), engine, tuple(share), most_nodes)
            for i, (model, share) in enumerate(zip(models, shares, strict=True))
        }
        self._warm = WarmPool(commands)

    def _await_workers(self, most_s: float) -> None:
        until = time.monotonic() + most_s
        while len(self.places) < len(self._workers):
            self._listen(None)
            self._call(None)
            for name, process in self._workers.items():
                if process.poll() is not None or time.monotonic() > until:
                    raise GroupError(
                        f"{name} did not start: its status is {process.poll()} after at most {most_s:.0f} s",
                        "look at its own messages above; `LLM(...)` with the same arguments says the same",
                    )
            wait([self._hub], _POLL_S)

    def _listen(self, dealer: Dealer | None) -> None:
        for name, message in self._hub.receive():
            if name not in self._workers:
                continue
            self._heard[name] = self._called
            if isinstance(message, Here):
                self.places[name] = message.places
            if dealer is not None:
                dealer.take(name, message)

    def _call(self, dealer: Dealer | None) -> None:
        """Ask the workers what they run, now and then: that shows that they are there, and what was lost."""
        if (now := time.monotonic()) < self._call_at:
            return
        self._call_at = now + BEAT_S
        self._called += 1
        has_drafter = {name: self._warm is not None and self._warm.is_ready(name) for name in self._workers}
        if dealer is not None:
            dealer.call(has_drafter, self._called)
        else:
            for name, can_draft in has_drafter.items():
                self._hub.send(name, Call(self._called, can_draft))

    def _watch(self, dealer: Dealer) -> None:
        """Look after the processes; requests of those that have ended go elsewhere."""
        if self._coordinator is not None:
            self._coordinator.watch()
        if self._warm is not None:
            self._warm.watch()
        for name, process in list(self._workers.items()):
            if (self._called - self._heard.get(name, self._called)) * BEAT_S > self._patience_s:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            # what it said before it ended still counts
            self._listen(dealer)
            dealer.lose(name)
            del self._workers[name]
            self.places.pop(name, None)
            if not self._workers:
                raise GroupError(
                    f"no worker is left; the last one, {name}, ended with status {process.returncode}",
                    "look at the workers' own messages above",
                )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _asks(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> list[Ask]:
        many = [params] * len(prompts) if isinstance(params, Mapping) else list(params)
        if len(many) != len(prompts):
            raise ConfigError(
                f"there are {len(prompts)} prompts and {len(many)} `sampling_params`", "give one for each"
            )
        self._batches += 1
        return [
            Ask(f"{self._batches}-{i}", _tokens(i, prompt), _params(one, self._rng))
            for i, (prompt, one) in enumerate(zip(prompts, many, strict=True))
        ]


# --- what users give, checked before a process is begun or a request is dealt -----------------------------------------


def _rules(ladder: str, methods: Sequence[str], most: int, drafter: str | Sequence[str]) -> Rules | None:
    """What the coordinator may decide; None: nobody helps anybody."""
    check_choice("ladder", ladder, LADDERS)
    if not isinstance(drafter, str) and not all(isinstance(model, str) and model for model in drafter):
        raise ConfigError(f"`drafter` is {drafter!r}", "name a model, or a list of models")
    if (ladder == "attach") != bool(drafter):
        raise ConfigError(
            f"`ladder` is {ladder!r}, and `drafter` is {drafter!r}",
            "drafters are attached with `ladder` `attach`, and that needs one",
        )
    if ladder == "off":
        return None
    return replace(Rules(mode=ladder, most=most), methods=tuple(methods))


def _most_nodes(spec_rollout: bool | Mapping[str, Any]) -> int | None:
    """As the workers' own drafters would have it; None: the default. What is wrong with it, a worker says."""
    own = spec_rollout.get("decoupled") if isinstance(spec_rollout, Mapping) else None
    most = own.get("most_nodes") if isinstance(own, Mapping) else None
    return most if isinstance(most, int) else None


def _tokens(number: int, prompt: Sequence[int]) -> tuple[int, ...]:
    """[P] token ids of a prompt, which a worker can be told."""
    try:
        found = tuple(int(operator.index(token)) for token in prompt)
    except TypeError:
        raise ConfigError(
            f"prompt {number} of `prompt_token_ids` is {shown(prompt)}, and not whole numbers alone",
            "give a list of token ids for each prompt, as [[1, 2], [3]]",
        ) from None
    wrong = next((token for token in found if not 0 <= token < LIMIT), None)
    if wrong is not None:
        raise ConfigError(
            f"prompt {number} of `prompt_token_ids` holds {shown(wrong)}, outside 0 to {LIMIT - 1}",
            "give the tokenizer's ids, without padding",
        )
    return found


def _params(given: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Arguments of `SamplingParams`, with a seed if it samples: every copy of the request has the same noise."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"`sampling_params` holds a {type(given).__name__}", 'give its arguments, as {"max_tokens": 64}'
        )
    found = dict(given)
    for key, allowed in (("n", (1,)), ("logprobs", (None, 0)), ("prompt_logprobs", (None,))):
        if key in found and found[key] not in allowed:
            raise ConfigError(
                f"`{key}` is {found[key]!r}, and a group takes {' or '.join(map(str, allowed))}",
                "ask for each answer by itself, with a seed of its own; or use one engine",
            )
    if found.get("seed") is None and found.get("temperature", 1.0) >= _GREEDY:
        found["seed"] = rng.randrange(1 << 62)
    try:
        # neither takes all that the other does
        json.dumps(found, allow_nan=False)
        msgspec.json.encode(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"`sampling_params` cannot be written as JSON: {error}", "use plain values") from None
    return found
