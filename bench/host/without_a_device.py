"""A V2 runner without a GPU: ours over vLLM's own class, whose steps go as far as attention's metadata.

What stands in: the device, which has its tokens at once and runs no kernel, and the scheduler. To be imported once this
process is set up for the V2 runner (bench/runner/interpreter.py).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.buffer_utils as buffer_utils
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

import vllm_specrollout.worker.v2.inputs as inputs
from vllm_specrollout import _core, drafters
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.trees.batch import over
from vllm_specrollout.types import DraftMode, FinishedRequest, FinishReason, IntArray
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.request import Desk
from vllm_specrollout.worker.v2.device_times import DeviceTimes
from vllm_specrollout.worker.v2.graphs import DraftGraphs
from vllm_specrollout.worker.v2.host import Host, StepState
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.runner import SpecRolloutV2

BLOCK = 16
PROMPT, ANSWER, SAMPLES, EARLIER = 200, 1200, 8, 8
VOCABULARY = 32_000
WARM_UP = 40
STAGES = ("before", "settle", "plan", "fill", "prepare")
CALLS: Counter[str] = Counter()
"""Kernels launched and arrays copied to the device since it was cleared."""


class Over(Exception):
    """The host's part of the step ends here."""


class Launches:
    """In the place of kernels: `kernel[grid](...)`."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            CALLS["launches"] += 1

        return launch


def _launch_of(answer: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        CALLS["launches"] += 1
        return answer(*args)

    return called


def _copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    def copied(*args: Any, **kwargs: Any) -> Any:
        CALLS["copies"] += 1
        return copy(*args, **kwargs)

    return copied


def leave_out_the_device() -> None:
    """Kernels and events of vLLM's do nothing; what they would answer has its shape."""
    buffer_utils._apply_write_kernel, buffer_utils.is_uva_available = Launches(), lambda: False
    for name, answer in (
        ("prepare_prefill_inputs", lambda *args: None),
        ("prepare_pos_seq_lens", lambda *args: None),
        ("combine_sampled_and_draft_tokens", lambda *args: torch.zeros(args[8], dtype=torch.int64)),
        ("expand_idx_mapping", lambda idx, total, *args: (torch.zeros(total, dtype=torch.int64),) * 2),
    ):
        setattr(model_runner, name, _launch_of(answer))
    for module in (model_runner, inputs, buffer_utils):
        module.async_tensor_h2d = _copying(module.async_tensor_h2d)  # type: ignore[attr-defined]
    torch.cuda.Event = Arrival  # type: ignore[assignment, misc]


class Arrival:
    """An event that has happened; the last one that was waited for says when the tokens came."""

    last = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        Arrival.last = time.thread_time()
        CALLS.clear()


class Device(GPUModelRunner):
    """vLLM's runner without a model; its steps end where attention's metadata would be made."""

    def __init__(self, config: SimpleNamespace, device: torch.device) -> None:
        nothing = SimpleNamespace(
            add_request=lambda *args: None, remove_request=lambda *args: None, apply_staged_writes=lambda: None
        )
        self.device, self.vllm_config = device, config
        self.max_num_reqs, self.max_model_len, self.max_num_tokens = config.batch, 4096, 8192
        self.model_config = SimpleNamespace(rswa_window=None)
        self.parallel_config = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
        self.observability_config = SimpleNamespace(cudagraph_metrics=False)
        self.req_states = RequestState(self.max_num_reqs, self.max_model_len, 8192, 0, VOCABULARY, device)
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_num_tokens, device)
        self.block_tables = BlockTables([BLOCK], self.max_num_reqs, 8192, [self.max_model_len // BLOCK], device)
        states = SimpleNamespace(seeds_set=np.zeros(self.max_num_reqs, np.bool_))
        self.sampler = SimpleNamespace(**vars(nothing), sampling_states=states)  # type: ignore[assignment]
        self.model_state = SimpleNamespace(  # type: ignore[assignment]
            **vars(nothing), num_new_sampled_tokens_per_step=1, preprocess_state=self._over
        )
        self.prompt_logprobs_worker = self.lora_state = nothing  # type: ignore[assignment]
        self.cudagraph_manager = SimpleNamespace(dispatch=self._dispatch)  # type: ignore[assignment]
        self.decode_query_len, self.is_last_pp_rank = 1, True
        self.use_pp = self.is_encoder_decoder = self.uses_inputs_embeds = False
        for name in ("pp_handler", "pooling_runner", "encoder_cache", "aux_output_connector", "adaptive_verification"):
            setattr(self, name, None)
        for name in ("pcp_manager", "lora_config", "kv_block_zeroer", "fast_prefill", "ubatch_runner"):
            setattr(self, name, None)
        self.kv_caches, self.kv_cache_config = [], SimpleNamespace(num_blocks=1 << 20)  # type: ignore[assignment]

    def prepare_attn(self, input_batch: Any) -> Any:
        self.batch = input_batch
        CALLS["launches"] += 2
        return (), torch.zeros(1, 1, dtype=torch.int64)

    def _dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)

    def _over(self, *args: Any) -> None:
        raise Over


class Timed(SpecRolloutV2, Device):
    """The runner as it is shipped, and when it does what."""

    def __init__(self, config: SimpleNamespace, spec: SpecRolloutConfig) -> None:
        device = torch.device("cpu")
        Device.__init__(self, config, device)
        self.spec_config, self.max_draft_tokens = spec, spec.max_draft_tokens
        self.req_states.draft_tokens = torch.zeros(self.max_num_reqs, self.max_draft_tokens, dtype=torch.int64)
        self.metrics = Metrics(spec.sources)
        # of a 7B model on an H200, so that the budget decides as it would there, however busy this host is
        self.now = 0.0
        self.spec_rollout = Speculator(
            drafters.build(spec),
            make_budget(spec),
            guard=Guard(is_strict=True),
            listeners=[self.metrics],
            clock=lambda: self.now,
        )
        self.host = Host(Drafting(self.spec_rollout), self.max_model_len, clock=lambda: self.now)
        self.inputs = TreeInputs(self.max_num_reqs, self.max_num_tokens, self.max_draft_tokens, device)
        self.tokens_ready, self.stats, self.desk = torch.cuda.Event(), Stats(), Desk(DraftMode.TREE)
        self.shape, self.step, self.draft_graphs = (DraftMode.TREE, ""), StepState(), DraftGraphs()
        self.output_copy_stream = None
        self.times = DeviceTimes(device)
        self.marks: dict[str, float] = {}
        plan = self.host.plan

        def planned(*args: Any) -> Any:
            trees = plan(*args)
            self.marks["plan"] = time.thread_time()
            return trees

        self.host.plan = planned  # type: ignore[method-assign]

    def take_in(self, keep: int = 0) -> None:
        super().take_in(keep)
        self.marks["settle"] = time.thread_time()

    def gather_batch_req_state(self, *args: Any) -> Any:
        self.marks["fill"] = time.thread_time()
        return super().gather_batch_req_state(*args)

    def timed_step(self, scheduler_output: SchedulerOutput) -> dict[str, float]:
        """Milliseconds of this thread in each stage of a step's host part; nothing of a step that drafts nothing.

        It waits for nothing here, so these are what a clock on the wall would show on a host that is not busy.
        """
        self.marks, begin = {}, time.thread_time()
        try:
            self.execute_model(scheduler_output)
            raise AssertionError("a step went on where its host part is over")
        except Over:
            end = time.thread_time()
        self.step.num_rows, self.step.ask_ms = self.batch.num_tokens, 0.0
        if "settle" not in self.marks:
            return {}  # drafting is paused
        home, settled, planned_at, filled = (Arrival.last, *(self.marks[k] for k in ("settle", "plan", "fill")))
        times = (home - begin, settled - home, planned_at - settled, filled - planned_at, end - filled)
        return {name: 1e3 * seconds for name, seconds in zip(STAGES, times, strict=True)}


class Rollout:
    """Requests whose answers are like earlier ones of their problems, and the schedule that they run by."""

    def __init__(self, runner: Timed, batch: int, seed: int = 0) -> None:
        self.runner, self.rng = runner, np.random.default_rng(seed)
        problems = [f"problem {i}" for i in range(-(-batch // SAMPLES))]
        self.families = {name: self.rng.integers(0, VOCABULARY, (4, PROMPT + ANSWER)) for name in problems}
        self.answers: dict[str, IntArray] = {}
        self.length: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.number = 0
        for name in problems:
            for i in range(EARLIER):
                tokens = self._answer(name)
                ending = FinishedRequest(
                    f"{name}, earlier {i}", name, tokens[:PROMPT], tokens[PROMPT:], FinishReason.FINISHED, 0
                )
                runner.spec_rollout.finish(ending)
        for drafter in runner.spec_rollout.drafters:
            if drafter.name == "history":
                drafter.begin_epoch()  # type: ignore[attr-defined]
        self.problem_of = {f"request {i}": problems[i // SAMPLES] for i in range(batch)}
        for request_id, problem in self.problem_of.items():
            self.answers[request_id], self.length[request_id] = self._answer(problem), PROMPT

    def _answer(self, problem: str) -> IntArray:
        """One of the problem's ways, changing to another one every 25 tokens or so: a branch for who comes later."""
        family = self.families[problem]
        at = np.cumsum(self.rng.random(family.shape[1]) < 0.04) * (1 + self.rng.integers(0, 3)) % len(family)
        at[:PROMPT] = 0
        return family[at, np.arange(family.shape[1])].astype(np.int32)

    def admit(self) -> None:
        """All requests come, in a step that computes their prompts."""
        new = []
        for request_id, problem in self.problem_of.items():
            tokens = self.answers[request_id][:PROMPT].tolist()
            params = SamplingParams(
                max_tokens=ANSWER, seed=1, extra_args={"spec_rollout": {"problem_id": problem}}, temperature=1.0
            )
            blocks = self._new_blocks(request_id, PROMPT)
            new.append(
                NewRequestData(request_id, tokens, [], params, None, blocks or ([],), 0, None, prefill_token_ids=tokens)
            )
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.num_scheduled_tokens = dict.fromkeys(self.problem_of, PROMPT)
        output.total_num_scheduled_tokens = PROMPT * len(new)
        self._numbered(output)
        try:
            self.runner.execute_model(output)
        except Over:
            self.runner.step.num_rows = self.runner.batch.num_tokens
            self._sample()
        histories: list[Any] = [d for d in self.runner.spec_rollout.drafters if d.name == "history"]
        while any(drafter.cache.stats().building for drafter in histories):
            time.sleep(0.001)

    def step(self) -> SchedulerOutput:
        """The next step's schedule: room for drafts, and blocks for what may come of them."""
        room = self.runner.max_draft_tokens
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(self.problem_of, 1 + room)
        output.total_num_scheduled_tokens = (1 + room) * len(self.problem_of)
        output.scheduled_spec_decode_tokens = {request_id: [-1] * room for request_id in self.problem_of}
        names = list(self.problem_of)
        computed = [self.length[name] - 1 for name in names]
        blocks = [self._new_blocks(name, self.length[name] + room) for name in names]
        output.scheduled_cached_reqs = CachedRequestData(
            names, set(), [], {}, blocks, computed, [n + 1 - PROMPT for n in computed]
        )
        self._numbered(output)
        return output

    def _numbered(self, output: SchedulerOutput) -> None:
        self.number += 1
        output.spec_rollout_step = self.number  # type: ignore[attr-defined]

    def _new_blocks(self, request_id: str, num_tokens: int) -> tuple[list[int]] | None:
        have, need = self.blocks.get(request_id, 0), -(-num_tokens // BLOCK)
        self.blocks[request_id] = max(have, need)
        return ([*range(have, need)],) if need > have else None

    def _sample(self) -> tuple[int, int]:
        """The target agrees with each tree as far as the request's own answer goes; returns nodes and tokens."""
        runner, names = self.runner, self.runner.batch.req_ids
        trees, width = over(runner.step.trees, names), runner.max_draft_tokens + 1
        truth = np.stack([self.answers[n][self.length[n] : self.length[n] + width] for n in names])
        num_accepted, _ = _core.follow(
            trees.node_start, trees.parents, trees.token_ids, truth, np.full(len(names), width - 1, np.int32)
        )
        counts = (num_accepted + 1).astype(np.int32)
        for name, count in zip(names, counts.tolist(), strict=True):
            self.length[name] += count
        output = SimpleNamespace(sampled_token_ids=truth.astype(np.int64), num_sampled_tokens_np=counts)
        runner.now += (4.0 + 0.012 * runner.step.num_rows) / 1e3
        runner._learn()
        runner._remember(output, runner.batch)
        return trees.num_nodes, int(counts.sum())

    def steps(self, count: int) -> Iterator[tuple[dict[str, float], Counter[str], int, int]]:
        """(times, calls, nodes, tokens) of each step."""
        for _ in range(count):
            output = self.step()
            times = self.runner.timed_step(output)
            calls = Counter(CALLS)
            yield times, calls, *self._sample()


def measured(batch: int, spec: SpecRolloutConfig, steps: int) -> str:
    runner = Timed(SimpleNamespace(batch=batch), spec)
    rollout = Rollout(runner, batch)
    rollout.admit()
    found = [one for i, one in enumerate(rollout.steps(WARM_UP + steps)) if i >= WARM_UP and one[0] and one[2]]
    runner.spec_rollout.close()
    for drafter in runner.spec_rollout.drafters:
        drafter.close()
    after = sorted(sum(times.values()) - times["before"] for times, *_ in found)
    stages = "".join(f"{statistics.median(times[name] for times, *_ in found):9.3f}" for name in STAGES)
    nodes, tokens = (statistics.mean(one[i] for one in found) / batch for i in (2, 3))
    calls = "".join(f"{statistics.median(one[1][kind] for one in found):9.0f}" for kind in ("launches", "copies"))
    p90 = after[int(0.9 * len(after))]
    return f"{batch:5d}{stages}{statistics.median(after):9.3f}{p90:9.3f}{calls}{nodes:9.1f}{tokens:9.2f}{len(found):7d}"
