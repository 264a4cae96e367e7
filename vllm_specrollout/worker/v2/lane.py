"""The lane: vLLM's own speculation on its V2 runner, made exact, with drafts that are made on the device.

What belongs here: where the lane differs from a plain step. vLLM drafts behind its sampler and schedules a step ahead,
so no step waits for the host. The host learns of drafts and tokens when they are home anyway; what it makes of that,
a pause, a request's most drafts, or a line to go on with, holds from a later step on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_specrollout.budgets.goodput import Acceptance
from vllm_specrollout.budgets.papers.fastgrpo import K_MAX
from vllm_specrollout.config import MODEL_SOURCES
from vllm_specrollout.config.budgets import FastGrpoOptions, TltOptions
from vllm_specrollout.drafters.beams import widest
from vllm_specrollout.drafters.looked_up import LateDrafts, LookedUpHistory
from vllm_specrollout.errors import logger
from vllm_specrollout.kernels.draft_choice.naive import MODELLED, WITHHELD
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.trees.batch import cut, first_paths, over, proposed
from vllm_specrollout.types import (
    TENTHS,
    DraftLimits,
    DraftMode,
    FloatArray,
    IntArray,
    RequestBatch,
    TreeBatch,
    VerifyResult,
)
from vllm_specrollout.worker.common import levels_of
from vllm_specrollout.worker.drafting import NO_DRAFTS
from vllm_specrollout.worker.scheduler import DraftReport
from vllm_specrollout.worker.v2.beams import Beams, levels_of_trees, scratch_blocks
from vllm_specrollout.worker.v2.device_drafts import LINE, Bystander, DeviceDrafts
from vllm_specrollout.worker.v2.graphs import TREES_UP_TO, profiled_graphs
from vllm_specrollout.worker.v2.host import InFlight
from vllm_specrollout.worker.v2.inputs import accepted_first, emptied, holds_prompt
from vllm_specrollout.worker.v2.model import DeviceModel
from vllm_specrollout.worker.v2.runner import SpecRolloutV2
from vllm_specrollout.worker.v2.texts import DeviceTexts
from vllm_specrollout.worker.v2.told import NOBODY, Told
from vllm_specrollout.worker.v2.verify import MOST_SPLIT_ROWS

_ON_DEVICE = ("history", "ngram", *MODEL_SOURCES)
_RUNNER = "vllm.v1.worker.gpu.model_runner"


@dataclass(frozen=True, slots=True)
class Home:
    """A step's drafts on their way to the host; they are there when the step's tokens are."""

    request_ids: list[str]
    # [R, 3 * K + 1] int32 as `choose` writes them; or one more: as `rows`
    words: np.ndarray
    # [R] how many of each draft had rows; None: `words` say
    rows: IntArray | None
    # sources of the kinds of drafts
    sources: tuple[int, ...]

    def proposed(self) -> TreeBatch:
        """All that was drafted, whatever had room."""
        most = (self.words.shape[1] - 1) // 3
        tokens, parents, bits = np.split(self.words[:, : 3 * most], 3, axis=1)
        is_there = tokens >= 0
        chances = np.clip(bits[is_there].view(np.float32), 1e-9, 1.0)
        starts = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))]).astype(np.int32)
        trees = proposed(self.request_ids, starts, tokens[is_there], parents[is_there], np.log(chances), 0)
        sources = np.array(self.sources, dtype=np.int32)[np.maximum(self.words[:, 3 * most], 0) % WITHHELD]
        trees.source[:] = np.repeat(sources, trees.sizes)
        return trees

    def is_covered(self, factors: FloatArray, levels: int, chance: float) -> bool:
        """Whether nobody has drafts of a model's, nor would so many levels of it have been expected to bring more.

        Args:
            factors: as `DeviceDrafts` has them.
            chance: that a token of the model's holds, as it usually says.
        """
        most = (self.words.shape[1] - 1) // 3
        # nobody's is no better than the model's
        kinds = np.minimum(self.words[:, 3 * most] % WITHHELD, MODELLED)
        # of no draft the bits are no number
        chances = np.where(self.words[:, :most] >= 0, self.words[:, 2 * most : 3 * most], 0).view(np.float32)
        tenths = np.minimum((chances * TENTHS).astype(np.int64), TENTHS - 1)
        known = np.minimum(chances * factors[kinds[:, None], tenths], 1.0)
        own = min(chance * factors[MODELLED, min(int(chance * TENTHS), TENTHS - 1)], 1.0)
        is_enough = known.cumprod(axis=1).sum(axis=1) >= (own ** np.arange(1, levels + 1)).sum()
        return bool((is_enough & (kinds != MODELLED)).all())

    def drafted(self) -> TreeBatch:
        """What of it was verified."""
        return self.cut(self.proposed())

    def cut(self, proposed: TreeBatch) -> TreeBatch:
        """What of this was verified."""
        return cut(proposed, self.words[:, -1] if self.rows is None else self.rows)


@contextmanager
def rebound(module_name: str, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Meanwhile a module finds something else under a name of its own.

    Args:
        wrap: takes what stands there, returns what is to.
    """
    module = importlib.import_module(module_name)
    stock = getattr(module, name)
    setattr(module, name, wrap(stock))
    try:
        yield
    finally:
        setattr(module, name, stock)


def _if_it_can(create: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's maker of what gives each step its drafts by cost; an attention backend that cannot has fixed windows."""

    def created(**kwargs: Any) -> Any:
        try:
            return create(**kwargs)
        except ValueError as error:
            logger.info("Spec rollout: how many drafts are verified is chosen a step ahead: %s", error)
            return None

    return created


def no_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of vLLM's maker of speculators, where no model drafts."""
    return lambda vllm_config, *args: Bystander(vllm_config.num_speculative_tokens)


class Lane(SpecRolloutV2):
    """Mixed into vLLM's V2 runners, whose configuration has a place for drafts (`with_lane`)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._levels = levels_of(vllm_config)
        # which backends bear it is known when the KV cache is set up
        self.speculator.enable_adaptive_verification = (
            device.type == "cuda"
            and self.spec_config.budget == "auto"
            and self.lora_config is None
            and self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        )
        lookups = [one for one in self.spec_rollout.drafters if isinstance(one, LateDrafts)]
        self._history = next((one for one in lookups if isinstance(one, LookedUpHistory)), None)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        texts = None if self._history is None else DeviceTexts(self._history.texts, device, stream)
        self.drafts = DeviceDrafts(
            self.speculator, self._levels, self.req_states, self._told_of, texts, self.spec_config.max_depth,
            self.spec_rollout.guard,
        )  # fmt: skip
        self.drafts.looks_up, self.drafts.withhold = bool(lookups), self._withhold
        self.drafts.changed, self.drafts.held = self._changed, self._held
        self.drafts.carries = len(lookups) < len(self.spec_rollout.drafters)
        # tells budgets of the drafts that came home last
        self._late = lookups[0] if lookups else LateDrafts()
        self._late.latest = lambda: self.latest
        names = self.spec_config.sources
        self._on_device = {i for i, name in enumerate(names) if name in _ON_DEVICE}
        # of what is looked up, carried in lines, and a model's
        elsewhere = next((i for i in range(len(names)) if i not in self._on_device), 0)
        self.sources = min(self._on_device, default=0), elsewhere, len(self.spec_config.drafters)
        # most drafts of requests of which fewer are verified than there are
        self._windows: dict[str, int] = {}
        # drafters on the host, whose drafts are carried to the device; by theirs, what they propose
        self._carried: dict[int, Callable[[RequestBatch, DraftLimits], TreeBatch]] = {}
        self.latest: TreeBatch = NO_DRAFTS
        """The drafts that came home last, whatever had room, for whoever chooses how many are verified."""
        # requests whose verdict is withheld in a step that is not home yet
        self._withheld: dict[str, None] = {}
        # requests that have come since drafts were made last
        self._arrived: set[str] = set()
        self._next_withheld = ""
        self._acceptance = Acceptance()
        # a model's passes need all ranks, which see at different times what came home
        speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
        self._may_skip = self._levels > 1 and not speculative.parallel_drafting and parallel.world_size_across_dp == 1
        # a model's may branch if its passes read the step's rows, which are brought into order for them
        self._has_trees = not self._levels or levels_of_trees(vllm_config) > 0
        self.drafts.rearranged = self._rearranged
        self.host.came_home, self.host.plan = self._came_home, self._plan

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._levels:
            own = self.speculator, self.model, self._levels, self.sources[2], self.req_states, self._acceptance
            self.model_drafter = DeviceModel(*own)
            self.model_drafter.heads.weights_version = lambda: self.weights_version.computed
            if not self.drafts.looks_up:
                self.model_drafter.latest = self._late.latest

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        with rebound(_RUNNER, "maybe_create_adaptive_verification_manager", _if_it_can):
            super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if self.model_drafter is not None:
            # vLLM has sized its first pass by the target's rows; how often its model runs goes by its own levels
            self.speculator.num_speculative_steps = self._levels
        if self.model_drafter is not None and not is_profiling:
            self.model_drafter.beams = self._beams(kv_cache_config)
            self.spec_rollout.replace_drafters([*self.spec_rollout.drafters, self.model_drafter])
            self.metrics.bounded(self.model_drafter.name, self.model_drafter.most_tokens)

    def _beams(self, kv_cache_config: KVCacheConfig) -> Beams | None:
        """The head's passes with several nodes of a request; None: there are none."""
        count, last = scratch_blocks(self.vllm_config, kv_cache_config), kv_cache_config.num_blocks
        if not count or self.shape[0] is not DraftMode.TREE:
            return None
        size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if list(self.kernel_block_sizes) != [size]:
            return None
        layers = self.compilation_config.static_forward_context
        caches = [layers[name].kv_cache for name in sorted(self.draft_layers)]
        options, model = self.spec_config.budget_options, self.model_drafter
        if isinstance(options, TltOptions):
            model.most_beams, model.is_by_q = widest(options.top_k), not options.noise
        elif isinstance(options, FastGrpoOptions):
            model.most_beams = widest(K_MAX)
        return Beams(self.speculator, caches, size, self._levels, range(last - count, last), model.expand)

    def capture_model(self, **kwargs: Any) -> int:
        # vLLM 0.29 knows no `profile_only`
        if kwargs.get("profile_only"):
            return super().capture_model(**kwargs) + (profiled_graphs(self) if self._has_trees else 0)
        if self._may_branch(1):
            # before vLLM's own, which locks the workspaces when it is done
            self.draft_graphs.capture(self)
        return super().capture_model(**kwargs)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        names = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        self._arrived.update(names)
        if self.model_drafter is not None and names:
            self.model_drafter.take([self.req_states.req_id_to_index[name] for name in names])

    def _remove_request(self, req_id: str) -> bool:
        row = self.req_states.req_id_to_index.get(req_id)
        if row is not None and self._levels:
            # drafts may reach beyond the next request's blocks, and must not find the last one's there
            for table in self.block_tables.block_tables:
                table.gpu[row].zero_()
        return super()._remove_request(req_id)

    def _told_of(self, name: str) -> Told:
        """What a lookup is to know of a request."""
        request = self.host.get(name)
        if request is None or request.admission.shape is DraftMode.OFF:
            return NOBODY
        admission, history = request.admission, self._history
        is_chain = admission.shape is DraftMode.CHAIN
        row, siblings = (-1, []) if history is None else (history.row_of(name), history.siblings_of(name))
        return Told(row, siblings, admission.ends, admission.max_draft_tokens, is_chain)

    def _changed(self) -> set[str]:
        """Of whom something else is to be told than so far."""
        names, self._arrived = self._arrived, set()
        return names if self._history is None else names | self._history.take_changed()

    def _held(self) -> set[str]:
        """They decode plainly until what was withheld of them is found again."""
        return {*self.drafting.withheld.held, *self._withheld}

    def _may_branch(self, num_requests: int) -> bool:
        return self.shape[0] is DraftMode.TREE and num_requests <= TREES_UP_TO and self._has_trees

    @property
    def _most(self) -> int:
        """Most drafts of a request in the next step: a chain has as many as it has levels."""
        depth = max(self.spec_config.max_depth, self._levels)
        return self.max_draft_tokens if self.drafts.may_branch else min(self.max_draft_tokens, depth)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _begun(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        step = self.step
        step.withheld, self._next_withheld = self._next_withheld, ""
        if self.shape[0] is DraftMode.OFF:
            self.drafts.is_paused = True
            return emptied(scheduler_output)
        step.room = {name: len(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()}
        step.has_drafts = bool(step.room)
        if step.has_drafts:
            # a prompt stays with vLLM's attention, and so does all that is computed beside it
            self.inputs.has_branches = self._may_branch(step.num_running) and not holds_prompt(scheduler_output)
            if self.inputs.has_branches:
                self._during.enter_context(self.draft_graphs.chosen_from(self))
                # a tree is verified as it is
                self._during.callback(setattr, self, "adaptive_verification", self.adaptive_verification)
                self.adaptive_verification = None
        self._bound_rows(scheduler_output)
        # vLLM's scheduler was told of no drafts, so it names none to be made
        scheduler_output.num_spec_tokens_to_schedule = self.max_draft_tokens
        self.drafts.may_branch = self._may_branch(step.num_running) and self.drafting.withheld.may_branch
        self.drafts.most = self._most
        model = self.model_drafter
        if model is not None:
            self.drafts.is_covered = model.is_resting or (self._may_skip and self.drafts.is_covered)
        self.drafts.model = None if model is None or model.is_resting else model
        self.drafts.is_paused = self.drafting.steps_off(step.number + 1, step.num_running) > 0
        return scheduler_output

    def _bound_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Where top-p is asked for, a draft's row takes the way that it would take without drafts (`TreeVerifier`)."""
        manager = self.adaptive_verification
        self.verifier.rows_are_on_device = self.step.has_drafts and manager is not None
        if manager is not None:
            rows = [self.req_states.req_id_to_index.get(name) for name in scheduler_output.num_scheduled_tokens]
            top_p = self.sampler.sampling_states.top_p.np[[row for row in rows if row is not None]]
            has_few = len(rows) <= MOST_SPLIT_ROWS and (top_p != 1.0).any()
            manager._max_total_logits = MOST_SPLIT_ROWS if has_few else get_max_chunk_logits(self.vocab_size)

    def prepare_inputs(self, *args: Any) -> InputBatch:
        batch = super().prepare_inputs(*args)
        if self.step.has_drafts:
            self.step.num_logits = np.diff(batch.cu_num_logits_np)
            self.inputs.set_drafted(batch, self.drafts.drafted)
        return batch

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        found = super().sample(hidden_states, input_batch, grammar_output)
        if self.step.has_drafts or self.drafts.are_fresh:
            # on the stream on which vLLM copies the tokens next, so that one event says that all of it is there
            is_known = not self.verifier.rows_are_on_device
            words = self.drafts.home(input_batch, rows_are_on_device=not is_known)
            self.output_copy_stream.wait_stream(self.main_stream)
            with torch.cuda.stream(self.output_copy_stream):
                rows = np.diff(input_batch.cu_num_logits_np) - 1 if is_known else None
                home = Home(input_batch.req_ids, async_copy_to_np(words), rows, self.sources)
            self.step.home, self.step.drafted = home, lambda: self._came(home, words)
        return found

    def _rearranged(self, batch: InputBatch, args: Any) -> tuple[InputBatch, Any]:
        """The step's rows as vLLM's speculators read them: what was accepted comes first."""
        if self.step.accepted is None:
            return batch, args
        # its model goes on from a chain
        self.inputs.by_ancestors = False
        metadata, slots, hidden, layers, *others = args
        _, path, num_sampled = self.step.accepted
        batch, (hidden, *moved) = accepted_first(batch, path, num_sampled, [hidden, *(layers or ())])
        # later passes write their own slots where vLLM keeps the step's
        self._commit()
        return batch, (metadata, slots, hidden, moved if layers else layers, *others)

    def _withhold(self, names: list[str]) -> str:
        """Now and then choose a request whose verdict is withheld in the next step, of those last seen with drafts."""
        withheld = self.drafting.withheld
        if withheld.drafted >= withheld.due and (seen := over(self.latest, names)).num_nodes:
            self._next_withheld = withheld.choose(seen)
            self._withheld |= dict.fromkeys(filter(None, [self._next_withheld]))
        return self._next_withheld

    def _came(self, home: Home, words: torch.Tensor) -> TreeBatch:
        """The step's drafts are home. Until then `words` is kept, which they are copied from."""
        self.latest = home.proposed()
        if self._may_skip and self.model_drafter is not None:
            chance = self.model_drafter.usual_chance
            self.drafts.is_covered = home.is_covered(self.drafts.factors, self._levels, chance)
        if self._history is not None:
            self._history.lookups += self.latest.num_requests
            self._history.hits += int(np.count_nonzero(self.latest.sizes))
        return home.cut(self.latest)

    def _came_home(self, step: InFlight, result: VerifyResult) -> None:
        self._withheld.pop(step.withheld, None)
        if step.trees.num_nodes and self.drafting.is_drafting:
            self._acceptance.weights_are(step.weights_version)
            self._acceptance.count(step.trees, result)
            self.drafts.factors = self._acceptance.calibration()[list(self.sources)]

    def _learn(self) -> None:
        # what is home is taken in, and nothing is waited for
        before = self.host.num_in_flight
        self.take_in(self.host.num_out)
        if self.host.num_in_flight < before and not self.drafts.is_paused and self.drafting.is_drafting:
            self._carry_lines()
        super()._learn()

    # --- what the host makes of it -----------------------------------------------------------------------------------

    def _report(self, output: Any) -> DraftReport:
        after, limits = self.step.number + 1, self.host.limits.copy()
        if not self.drafting.is_apart:  # each rank has a scheduler of its own there, and one of them a budget
            limits |= self._windows
        asks_at = after + self.drafting.steps_off(after, self.step.num_running)
        report = DraftReport(asks_at, limits, {}, self._most)
        get_output, home = output.get_output, self.step.home

        def counted() -> Any:
            found = get_output()
            trees = home.drafted()
            report.drafted.update(zip(trees.request_ids, trees.sizes.tolist(), strict=True))
            return found

        if self.step.has_drafts:
            output.get_output = counted
        return report

    def _plan(self, step: InFlight) -> PlannedStep | None:
        """What the budget would verify of a step's drafts. A request of which it would leave some gets less room."""
        most = self.max_draft_tokens
        room = {r.request_id: most for r in step.requests if r is not None and r.length > r.begins_at}
        batch = self.host.batch(room, may_branch=True)
        planned = self.drafting.look_ahead(batch, step.number)
        if planned is None:
            return None
        chosen = cut(planned.plan.trees, batch.max_nodes).sizes
        there = np.max([np.zeros_like(chosen), *(one.sizes for one in planned.proposals)], axis=0)
        is_cut = (chosen < there) | ((there == 0) & self.spec_rollout.budget.backs_off)
        self._windows = {name: int(chosen[i]) for i, name in enumerate(batch.request_ids) if is_cut[i]}
        return planned

    def _carry_lines(self) -> None:
        """Have drafters on the host draft from the tokens that are known. What they propose goes to the device as
        lines: it is ahead by then, so they are as long as they may be."""
        speculator = self.spec_rollout
        asked = [one for one in speculator.drafters if not isinstance(one, LateDrafts)]
        for drafter in asked:
            if id(drafter) not in self._carried:
                # a budget hears of its drafts when they have been verified, from whoever tells of all
                is_told = len(asked) < len(speculator.drafters) or bool(self._carried)
                self._carried[id(drafter)] = drafter.propose
                drafter.propose = (LateDrafts() if is_told else self._late).propose  # type: ignore[method-assign]
        room = dict.fromkeys(self.req_states.req_id_to_index, LINE)
        batch = self.host.batch(room, may_branch=False) if asked else None
        if batch is None or not batch.size:
            return
        limits = DraftLimits(batch.max_nodes, np.minimum(batch.max_depth, LINE), np.ones(batch.size, dtype=np.bool_))
        for drafter in asked:
            try:
                self._carry(batch, self._carried[id(drafter)](batch, limits))
            except CONTAINED as error:
                speculator.failed(drafter, error)

    def _carry(self, batch: RequestBatch, trees: TreeBatch) -> None:
        drafted = np.flatnonzero(trees.sizes)
        if len(drafted):
            lines = np.full((len(drafted), 1 + LINE), -1, dtype=np.int32)
            lines[:, 0] = [len(batch.views[i].token_ids) for i in drafted]
            paths = first_paths(trees)[drafted, :LINE]
            lines[:, 1 : 1 + paths.shape[1]] = paths
            rows = [self.req_states.req_id_to_index[trees.request_ids[i]] for i in drafted]
            self.drafts.carry(np.array(rows, dtype=np.int32), lines)
