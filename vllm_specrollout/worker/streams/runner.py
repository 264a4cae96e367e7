"""The V1 model runner and worker on CPU of an engine that drafts: our own, whose drafts nobody verifies here."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specrollout.decoupled.stream import Choices
from vllm_specrollout.worker.streams.sampler import choices_of
from vllm_specrollout.worker.streams.step import StreamOutput, StreamStep, step_of
from vllm_specrollout.worker.v1.cpu_runner import SpecRolloutCPURunner
from vllm_specrollout.worker.v1.worker import SpecRolloutCPUWorker


class StreamCPURunner(SpecRolloutCPURunner):
    """Trees get through the pass as in verification; then each row says what it would have behind it."""

    _pass = StreamStep()
    # request -> [rows]
    _choices: dict[str, list[Choices]]

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._pass = step_of(scheduler_output)
        self._planned = self._pass.trees
        self._choices = {}
        for name, tokens in self._pass.grown.items():
            if name in self.requests:
                self._grow(name, tokens)
        return super()._update_states(scheduler_output)

    def _grow(self, name: str, tokens: list[int]) -> None:
        """The request has these tokens as well."""
        request, batch = self.requests[name], self.input_batch
        begin = request.num_tokens
        request.output_token_ids.extend(tokens)
        row = batch.req_id_to_index.get(name)
        if row is not None:
            batch.token_ids_cpu[row, begin : begin + len(tokens)] = tokens
            batch.is_token_ids[row, begin : begin + len(tokens)] = True
            batch.num_tokens_no_spec[row] = begin + len(tokens)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        names, trees = self.input_batch.req_ids, self.step.trees
        counts = [1] * len(names) if trees is None else (trees.sizes + 1).tolist()
        self.paths.plan = None
        if all(name in self._pass.follow for name in names):
            rows = iter(choices_of(logits, names, counts, self._pass))
            self._choices = {name: [next(rows) for _ in range(n)] for name, n in zip(names, counts, strict=True)}
        # no token is sampled: requests grow by what the target says
        self.discard_request_mask.np[: len(names)] = True
        none = torch.zeros((len(names), 1), dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=none, logprobs_tensors=None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = CPUModelRunner.sample_tokens(self, grammar_output)
        if not isinstance(output, ModelRunnerOutput) or not self._choices:
            return output
        return StreamOutput.carrying(output, self._choices)


class StreamCPUWorker(SpecRolloutCPUWorker):
    """Chosen by `worker_cls`."""

    def init_device(self) -> None:
        super().init_device()
        # what it made holds no weights yet
        self.model_runner = StreamCPURunner(self.vllm_config, torch.device("cpu"))
