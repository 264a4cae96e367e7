"""vLLM's engine as a group's worker drives it: in its own process, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_specrollout.cluster.group.member import Tries
from vllm_specrollout.cluster.group.messages import Link, Piece, Run
from vllm_specrollout.config.resuming import resumed
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.worker.request import external_name

_MOST_REASON = 1000  # characters


class RolloutEngine:
    """One engine.

    Args:
        arguments: of `vllm.LLM`, `spec_rollout` among them.
        drafter: where a warm drafter on this worker's cores listens; empty: there is none.
        drafter_model: what drafts there.
    """

    def __init__(self, arguments: Mapping[str, Any], drafter: str = "", drafter_model: str = "") -> None:
        self.llm = LLM(**{"max_num_seqs": 32, **arguments})
        self._engine = self.llm.llm_engine
        self.core: Any = self._engine.engine_core.engine_core
        self.places = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self.drafter, self.drafter_model = drafter, drafter_model
        runner = self.core.model_executor.driver_worker.worker.model_runner
        self._speculator = runner.spec_rollout
        self._all_drafters = self._speculator.all_drafters()
        self._tries = Tries(external_name)
        self._speculator.listeners.append(self._tries)
        # request -> tokens of its answer so far
        self._positions: dict[str, int] = {}
        self._links: dict[str, tuple[str, ...]] = {}

    def add(self, run: Run) -> None:
        """
        Raises:
            ValueError: vLLM's, or ours, with what is wrong.
        """
        prompt, params = resumed(sampling(run.params), run.prompt, run.answer)
        self._engine.add_request(run.request, {"prompt_token_ids": prompt}, params)
        self._positions[run.request] = len(run.answer)
        self._tries.begin(run.request)

    def abort(self, request: str) -> None:
        self._engine.abort_request([request])
        self._forget(request)

    def step(self) -> Sequence[Piece]:
        pieces = []
        for output in self._engine.step():
            one, request = output.outputs[0], output.request_id
            if request not in self._positions:
                continue
            tokens = tuple(one.token_ids)
            logprobs = () if one.logprobs is None else tuple(
                own[token].logprob for own, token in zip(one.logprobs, tokens, strict=True)
            )  # fmt: skip
            finish = (one.finish_reason or "stop") if output.finished else ""
            reason = "" if one.stop_reason is None else str(one.stop_reason)[:_MOST_REASON]
            pieces.append(Piece(request, self._positions[request], tokens, logprobs, finish, reason))
            self._positions[request] += len(tokens)
            if finish:
                self._forget(request)
        return pieces

    def tries(self, request: str) -> tuple[int, int]:
        return self._tries.counts.get(request, (0, 0))

    def draft_with(self, method: str) -> None:
        chosen = [one for one in self._all_drafters if not method or one.name == method]
        if not chosen:
            known = ", ".join(one.name for one in self._all_drafters) or "none"
            raise ConfigError(f"this engine has no drafter `{method}`", f"it has: {known}")
        # their places among all drafters stay: nodes are counted by them
        self._speculator.draft_with(chosen)

    def attach(self, drafter: str, address: str, requests: Sequence[str]) -> None:
        if drafter in self._links:
            self._ask("assign_drafter", drafter, list(requests))
        else:
            self._ask("attach_drafter", drafter, address, request_ids=list(requests))
        self._links[drafter] = tuple(requests)

    def detach(self, drafter: str) -> None:
        if self._links.pop(drafter, None) is not None:
            self._ask("detach_drafter", drafter)

    def links(self) -> Sequence[Link]:
        return [Link(drafter, requests) for drafter, requests in self._links.items()]

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _forget(self, request: str) -> None:
        self._positions.pop(request, None)
        self._tries.forget(request)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        (found,) = self.llm.collective_rpc(method, args=args, kwargs=kwargs)
        if "cause" in found:
            raise ConfigError(found["cause"], found["hint"])


def sampling(given: Mapping[str, Any]) -> SamplingParams:
    """
    Raises:
        ValueError: vLLM's, or one for a key that it does not know.
    """
    values = dict(given)
    if values.get("logit_bias"):
        # JSON has names for keys
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if isinstance(values.get("structured_outputs"), Mapping):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    # texts are looked at for stop strings alone
    own = {"output_kind": RequestOutputKind.DELTA, "detokenize": bool(values.get("stop"))}
    try:
        return SamplingParams(**{**values, **own})
    except TypeError as error:
        raise ConfigError(f"`sampling_params` cannot be used: {error}", "give arguments of `SamplingParams`") from None
