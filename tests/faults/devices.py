"""Our model runners, whole, over devices that are a dictionary: vLLM's part of a step in a few lines.

What belongs here: what vLLM's runners do for ours, on V1 and on V2, and nothing of what is checked. Tokens, blocks and
endings come from vLLM's own schedulers; a row's token follows from the state behind it (target.py).
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors

from tests.faults.target import VOCAB, Cache, Prompted, extend, following
from tests.trees import batch_of, chain
from tests.v2.fuzz import FuzzLookup
from vllm_specrollout import _core
from vllm_specrollout.budgets.goodput import Acceptance
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.trees.batch import token_lists
from vllm_specrollout.types import DraftMode, TreeBatch, empty_trees
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import NO_DRAFTS, Drafting
from vllm_specrollout.worker.request import Admissions, RequestBook
from vllm_specrollout.worker.v1.runner import NOBODY, SpecRolloutV1, V1Step
from vllm_specrollout.worker.v2.device_drafts import Bystander, DeviceDrafts
from vllm_specrollout.worker.v2.host import Host
from vllm_specrollout.worker.v2.host import StepState as StepStateV2
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.lane import Lane
from vllm_specrollout.worker.v2.texts import DeviceTexts

MOST_TOKENS = 160
MOST_ROWS = 1024


@dataclass
class Row:
    """One request on the device."""

    wanted: Prompted
    tokens: list[int]
    # so many of them are in the KV cache
    computed: int
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.wanted.prompt)

    def comes(self, count: int, weights: int) -> list[int]:
        """What it goes on with."""
        return self.wanted.go_on(self.tokens[len(self.wanted.prompt) :], count, weights)


def prompted(prompt: Sequence[int], params: SamplingParams) -> Prompted:
    return Prompted(tuple(prompt), params.seed or 0, params.structured_outputs is not None)


class Device:
    """Computes rows.

    Args:
        cache: the KV cache.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.weights = 0
        self.rows: dict[str, Row] = {}

    def take_in(self, output: Any) -> None:
        """Requests that come, and blocks for those that are there."""
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            wanted = prompted(new.prompt_token_ids, new.sampling_params)
            self.rows[new.req_id] = Row(wanted, tokens, new.num_computed_tokens, list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                row.blocks = list(blocks[0])
            elif blocks is not None:
                row.blocks += blocks[0]

    def compute(
        self, names: Sequence[str], scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], trees: TreeBatch
    ) -> list[list[int] | None]:
        """The states behind each request's last known token and its nodes; None: still in its prompt.

        Args:
            drafts: by request, the tokens of its nodes, as the scheduler has them.
            trees: how they hang together, over the requests in order.
        """
        found: list[list[int] | None] = []
        for i, name in enumerate(names):
            row, nodes = self.rows[name], drafts.get(name, ())
            row.num_known = scheduled[name] - len(nodes)
            end = row.computed + row.num_known
            state = self.cache.read(row.blocks, row.computed - 1)
            for position in range(row.computed, end):
                state = extend(state, row.tokens[position])
                self.cache.write(row.blocks, position, state)
            if end < len(row.tokens):
                found.append(None)
                continue
            tree, states = trees.tree(i), [state]
            assert tree.size == len(nodes), "each token of the schedule is a node"
            for place, (token, parent) in enumerate(zip(nodes, tree.parents.tolist(), strict=True)):
                states.append(extend(states[parent + 1], token))
                self.cache.write(row.blocks, end + place, states[-1])
            found.append(states)
        return found

    def sample(
        self, names: Sequence[str], states: Sequence[list[int] | None], trees: TreeBatch, masks: Any
    ) -> list[int]:
        """A token for the root and each node, request by request; 0 where there is none."""
        allowed = (
            {} if masks is None else dict(zip(masks.structured_output_request_ids, masks.grammar_bitmask, strict=True))
        )
        found: list[int] = []
        for i, name in enumerate(names):
            row, own, tree = self.rows[name], states[i], trees.tree(i)
            if own is None:
                found += [0] * (1 + tree.size)
                continue
            parities = allowed.get(name, [])
            assert len(parities) <= 1 + tree.size
            for place, state in enumerate(own):
                parity = parities[place] if place < len(parities) else None
                found.append(following(state, self.weights, row.wanted.salt, parity))
        return found

    def commit(self, name: str, states: Sequence[int], accepted: Sequence[int]) -> None:
        """The accepted nodes' states stand where plain decoding would have put them."""
        row = self.rows[name]
        for place, node in enumerate(accepted):
            self.cache.write(row.blocks, row.computed + row.num_known + place, states[node + 1])
        row.computed += row.num_known + len(accepted)


class _Sampler:
    """In place of vLLM's: the logits are the tokens already."""

    logprobs_mode = "raw_logprobs"

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=logits.view(-1, 1), logprobs_tensors=None)


_GREEDY = SimpleNamespace(
    all_greedy=True, all_random=False, temperature=None, top_p=None, top_k=None, max_num_logprobs=None,
    logprob_token_ids=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(0),
    presence_penalties=torch.zeros(0), repetition_penalties=torch.zeros(0), output_token_ids=[],
    allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    thinking_budget_state_holder=None,
)  # fmt: skip


class StockV1:
    """vLLM's V1 runner, as far as ours calls it."""

    device_: Device

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        """Nothing of vLLM's."""

    def _update_states(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._on_request_state_removed(name, self.requests.pop(name, None))
            self.device_.rows.pop(name, None)
        self.device_.take_in(output)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                req_id=new.req_id, prompt_token_ids=new.prompt_token_ids, sampling_params=new.sampling_params,
                prompt_embeds=None, generator=None, output_token_ids=[], num_prompt_tokens=len(new.prompt_token_ids),
            )  # fmt: skip
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.device_.rows[name].computed = computed

    def execute_model(self, output: Any) -> Any:
        self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, names = self.input_batch, list(output.num_scheduled_tokens)
        counts = np.asarray(list(output.num_scheduled_tokens.values()), np.int32)
        batch.req_ids, batch.num_reqs = names, len(names)
        self.query_start_loc.np = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch.num_computed_tokens_cpu[: len(names)] = [self.device_.rows[name].computed for name in names]
        self._prepare_inputs(output, counts)
        trees = empty_trees(names) if self.step.trees is None else self.step.trees
        drafts = output.scheduled_spec_decode_tokens
        self.states = self.device_.compute(names, output.num_scheduled_tokens, drafts, trees)
        self.discard_request_mask.np = np.asarray([own is None for own in self.states], np.bool_)
        self.execute_model_state = output
        return None

    def _prepare_inputs(self, output: Any, num_scheduled_tokens: np.ndarray) -> None:
        """Tokens and positions are the device's."""

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        batch, self.execute_model_state = self.input_batch, None
        trees = empty_trees(batch.req_ids) if self.step.trees is None else self.step.trees
        rows = self.device_.sample(batch.req_ids, self.states, trees, grammar_output)
        sampled = self._sample(torch.tensor(rows), None).sampled_token_ids.tolist()
        tokens: list[list[int]] = []
        for i, (name, own, states) in enumerate(zip(batch.req_ids, sampled, self.states, strict=True)):
            row = self.device_.rows[name]
            if states is None:
                tokens.append([])
                continue
            tokens.append([token for token in own if token >= 0])
            row.tokens += tokens[-1]
            self.requests[name].output_token_ids += tokens[-1]
            batch.token_ids_cpu[i, : len(row.tokens)] = row.tokens
            batch.num_tokens_no_spec[i] = len(row.tokens)
        index = {name: i for i, name in enumerate(batch.req_ids)}
        return ModelRunnerOutput(req_ids=list(batch.req_ids), req_id_to_index=index, sampled_token_ids=tokens)


class RunnerV1(SpecRolloutV1, StockV1):
    """Ours, over that."""

    def __init__(self, device: Device, speculator: Speculator, metrics: Metrics, most_requests: int) -> None:
        self.device_, self.spec_rollout, self.metrics = device, speculator, metrics
        self.noise = SimpleNamespace(keep=lambda *step: None, settle=lambda: None)
        self.sampler, self.stats = _Sampler(), Stats()
        self.drafting = Drafting(speculator)
        self.weights_version = self.drafting.weights_version
        self.book = RequestBook(DraftMode.TREE, lambda generator: None, self.drafting.admit)
        self.shape, self.max_model_len = (DraftMode.TREE, ""), MOST_TOKENS
        self.step, self._planned, self._timing = V1Step(0, 0.0, 0), NO_DRAFTS, None
        self._undrafted = NOBODY
        self.model_drafter = self.speculative_config = self.execute_model_state = None
        self.requests: dict[str, Any] = {}
        self.query_start_loc, self.discard_request_mask = SimpleNamespace(np=None), SimpleNamespace(np=None)
        self.input_batch = SimpleNamespace(
            req_ids=[], num_reqs=0, sampling_metadata=_GREEDY, generators={}, thinking_budget_state_holder=None,
            token_ids_cpu=np.zeros((most_requests, MOST_TOKENS + 64), np.int32),
            num_tokens_no_spec=np.zeros(most_requests, np.int32),
            num_computed_tokens_cpu=np.zeros(most_requests, np.int32),
        )  # fmt: skip

    def _lay_out(self, trees: TreeBatch) -> None:
        """The device takes any tree."""

    def _commit(self, sampled: Any, trees: TreeBatch) -> None:
        ends = np.cumsum(sampled.num_accepted)
        for name, states, end, count in zip(trees.request_ids, self.states, ends, sampled.num_accepted, strict=True):
            if states is not None:
                self.device_.commit(name, states, sampled.accepted[end - count : end].tolist())


class States:
    """vLLM's of running requests, whose rows go from one to the next: what lies behind them may be another's."""

    device = torch.device("cpu")

    def __init__(self, most_requests: int, width: int) -> None:
        self.max_num_reqs, self.num_speculative_steps, self.max_model_len = most_requests, width, MOST_TOKENS + 64
        self.req_id_to_index: dict[str, int] = {}
        self.total_len = SimpleNamespace(gpu=torch.zeros(most_requests, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(most_requests, self.max_model_len, dtype=torch.int32))
        # of prompt and answer: what is drafted behind an answer's limit is a matter of speed alone
        self.max_seq_len = np.full(most_requests, self.max_model_len, dtype=np.int32)

    def add(self, name: str) -> None:
        taken = self.req_id_to_index.values()
        self.req_id_to_index[name] = next(i for i in range(self.max_num_reqs) if i not in taken)

    def tell(self, name: str, tokens: Sequence[int]) -> None:
        row = self.req_id_to_index[name]
        self.total_len.gpu[row] = len(tokens)
        self.all_token_ids.gpu[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)


class Spoilt(FuzzLookup):
    """Looks up what comes, and often finds something else: a text that is another's, torn, or gone."""

    def __init__(self, runner: Any, seed: int) -> None:
        super().__init__(runner, {}, VOCAB, seed, quality=0.9)

    def __call__(self, batch: Any, asked: Any, on_device: Any) -> Any:
        self._runner.drafts.texts.apply()
        return super().__call__(batch, asked, on_device)

    def _rest(self, name: str, row: int) -> list[int]:
        rows, chance = self._runner.device_.rows, self._rng.random()
        one = rows[str(self._rng.choice(list(rows)))] if chance < 0.15 else rows[name]
        rest = [] if chance > 0.9 else one.comes(MOST_TOKENS, self._runner.device_.weights)
        if 0.8 < chance <= 0.9 and rest:
            torn = int(self._rng.integers(len(rest)))
            rest = rest[:torn] + [0] * (len(rest) - torn)
        return rest


class Output:
    """vLLM's of a step that is on its way: its tokens are there when somebody asks for them."""

    def __init__(self, names: list[str], sampled: np.ndarray, counts: np.ndarray) -> None:
        index = {name: i for i, name in enumerate(names)}
        self.model_runner_output = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=None)
        self.sampled_token_ids, self.num_sampled_tokens_np = sampled, counts

    def get_output(self) -> ModelRunnerOutput:
        rows = zip(self.sampled_token_ids, self.num_sampled_tokens_np, strict=True)
        self.model_runner_output.sampled_token_ids = [row[:count].tolist() for row, count in rows]
        return self.model_runner_output


class StockV2:
    """vLLM's V2 runner, as far as ours calls it."""

    device_: Device

    def _remove_request(self, name: str) -> bool:
        self.req_states.req_id_to_index.pop(name, None)
        return self.device_.rows.pop(name, None) is not None

    def add_requests(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._remove_request(new.req_id)
            self.req_states.add(new.req_id)
        self.device_.take_in(output)
        for new in output.scheduled_new_reqs:
            self.req_states.tell(new.req_id, self.device_.rows[new.req_id].tokens)

    def execute_model(self, output: Any) -> Any:
        for name in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            self._remove_request(name)
        self.add_requests(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = self.prepare_inputs(output)
        self.inputs.slots = ()
        names, room = batch.req_ids, np.diff(batch.cu_num_logits_np) - 1
        trees = self._laid_out(batch, room) if self.step.has_drafts else empty_trees(names)
        known = {name: output.num_scheduled_tokens[name] - own for name, own in zip(names, room.tolist(), strict=True)}
        nodes = dict(zip(names, token_lists(trees), strict=True))
        scheduled = {name: count + len(nodes[name]) for name, count in known.items()}
        states = self.device_.compute(names, scheduled, nodes, trees)
        self.execute_model_state = SimpleNamespace(input_batch=batch, trees=trees, states=states)
        return None

    def prepare_inputs(self, output: Any) -> Any:
        names = list(output.num_scheduled_tokens)
        rooms = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        rows = np.asarray([self.req_states.req_id_to_index[name] for name in names], np.int64)
        logits = np.cumsum([0, *(1 + room for room in rooms)]).astype(np.int32)
        starts = torch.tensor(np.cumsum([0, *output.num_scheduled_tokens.values()]), dtype=torch.int32)
        return SimpleNamespace(
            req_ids=names, num_reqs=len(names), num_tokens=output.total_num_scheduled_tokens, idx_mapping_np=rows,
            idx_mapping=torch.from_numpy(rows), cu_num_logits_np=logits, cu_num_logits=torch.from_numpy(logits),
            query_start_loc=starts, input_ids=torch.zeros(int(starts[-1]), dtype=torch.int32),
            logits_indices=torch.arange(int(logits[-1])), num_draft_tokens=sum(rooms),
            seq_lens=torch.zeros(len(names), dtype=torch.int32),
        )  # fmt: skip

    def _laid_out(self, batch: Any, room: np.ndarray) -> TreeBatch:
        """The step's drafts as its rows have them; a row without a draft is none that anything follows from."""
        tokens, parents = self.inputs.draft_ids.numpy(), self.inputs.parents.numpy()
        trees = []
        for first, size in zip(batch.cu_num_logits_np[:-1].tolist(), room.tolist(), strict=True):
            own = slice(first + 1, first + 1 + size)
            count = int(np.count_nonzero(tokens[own] >= 0))
            assert (tokens[own][:count] >= 0).all(), "drafts lie side by side"
            trees.append(chain(tokens[own][:count].tolist()))
            trees[-1].parents[:] = parents[own][:count] - 1
        return batch_of(trees, batch.req_ids)

    def judge(self, withheld: torch.Tensor, masks: Any) -> tuple[np.ndarray, np.ndarray]:
        """[R, some] sampled tokens, and [R] how many of them count.

        Args:
            withheld: [R] bool: who gets the first token of its path alone.
        """
        state = self.execute_model_state
        names, trees, states = state.input_batch.req_ids, state.trees, state.states
        rows = np.asarray(self.device_.sample(names, states, trees, masks), np.int64)
        sampled, _, num_accepted, accepted = _core.walk(trees.node_start, trees.parents, trees.token_ids, rows)
        counts, ends = np.zeros(len(names), np.int32), np.cumsum(num_accepted)
        state.accepted = [
            accepted[end - count : end].tolist() for end, count in zip(ends, num_accepted.tolist(), strict=True)
        ]
        for i, own in enumerate(states):
            counts[i] = 0 if own is None else 1 if withheld[i] else num_accepted[i] + 1
        return sampled, counts

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        output = self.verifier(None, input_batch, self.inputs, torch.zeros(input_batch.num_reqs))[0]
        return output, output.num_sampled, None

    def sample_tokens(self, grammar_output: Any) -> Any:
        state, self._masks = self.execute_model_state, grammar_output
        batch = state.input_batch
        found, _, _ = self.sample(torch.zeros(len(batch.logits_indices)), batch, None)
        self.execute_model_state = None
        sampled, counts = found.sampled_token_ids, found.num_sampled
        for i, (name, own) in enumerate(zip(batch.req_ids, state.states, strict=True)):
            row = self.device_.rows[name]
            if own is None:
                row.computed += row.num_known
                continue
            row.tokens += sampled[i, : counts[i]].tolist()
            # a chain's stand where they belong; a tree's are moved there
            if not self.inputs.has_branches:
                assert state.accepted[i] == list(range(len(state.accepted[i])))
            self.device_.commit(name, own, state.accepted[i][: counts[i] - 1])
            self.req_states.tell(name, row.tokens)
        self._drafted = DraftTokenIds(batch.req_ids, self.drafts.propose(batch).tolist())
        return Output(batch.req_ids, sampled, counts)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self._drafted


class RunnerV2(Lane, StockV2):
    """Ours, over that."""

    adaptive_verification = lora_config = experts = model_drafter = execute_model_state = _drafted = None
    _levels = 0
    _may_skip, _has_trees = False, True

    def __init__(
        self, device: Device, speculator: Speculator, metrics: Metrics, most_drafted: int, most_requests: int,
        history: Any, clock: Any, event: Any, seed: int,
    ) -> None:  # fmt: skip
        self.device_, self.spec_rollout, self.metrics, self._history = device, speculator, metrics, history
        self.max_draft_tokens, self.stats, self.admissions = most_drafted, Stats(), Admissions(DraftMode.TREE)
        self.spec_config, self.host = SimpleNamespace(max_depth=8), Host(Drafting(speculator), MOST_TOKENS, clock=clock)
        cpu = torch.device("cpu")
        self.inputs = TreeInputs(most_requests, MOST_ROWS, cpu)
        self.req_states = States(most_requests, most_drafted)
        texts, nobody = DeviceTexts(history.texts, cpu), Bystander(most_drafted)
        self.drafts = DeviceDrafts(nobody, 0, self.req_states, self._told_of, texts, 8, speculator.guard)
        self.drafts.withhold, self.drafts.changed, self.drafts.held = self._withhold, self._changed, self._held
        self._arrived: set[str] = set()
        Spoilt(self, seed)
        self._late, history.latest = history, lambda: self.latest
        # of the drafters: history and n-grams are looked up, the first one's drafts are carried in lines
        self._on_device, self.sources = {2, 3}, (2, 0, 4)
        self.latest, self._withheld, self._next_withheld, self._windows, self._carried = NO_DRAFTS, {}, "", {}, {}
        self._acceptance = Acceptance()
        self.host.came_home, self.host.plan = self._came_home, self._plan
        self.draft_graphs = SimpleNamespace(chosen_from=lambda runner: contextlib.nullcontext())
        self.verifier = _Verifier(self)
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.mover = SimpleNamespace(move=lambda *args: None)
        self.main_stream, self.output_copy_stream = None, SimpleNamespace(wait_stream=lambda stream: None)
        self.tokens_ready, self.step = event(), StepStateV2()
        self.shape, self._told = (DraftMode.TREE, ""), ()


class _Verifier:
    """In place of ours: what is sampled is the device's to say."""

    rows_are_on_device = False

    def __init__(self, runner: RunnerV2) -> None:
        self._runner = runner

    def __call__(self, logits: Any, batch: Any, inputs: TreeInputs, withheld: torch.Tensor) -> tuple[Any, Any]:
        sampled, counts = self._runner.judge(withheld, self._runner._masks)
        return SimpleNamespace(sampled_token_ids=sampled, num_sampled=counts, num_rejected=None), None
