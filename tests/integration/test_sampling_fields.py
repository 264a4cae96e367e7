"""Every field that vLLM samples by is spread over the rows of drafts, refused, or of no account: none is forgotten."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.gpu.sample
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from tests.trees import batch_of, tree_of
from vllm_specrollout.worker.v1.sampler import BUILTIN, _spread_metadata, row_layout
from vllm_specrollout.worker.v1.thinking import clear_inherited

# requests of 0, 2 and 1 nodes: six rows
TREES = batch_of([tree_of([], [], []), tree_of([-1, 0], [7, 8], [0.5, 0.5]), tree_of([-1], [9], [0.5])])
OWNER, DEPTH = row_layout(TREES)
OUTPUTS = [[1], [2, 2], [3]]
START, END, VOCABULARY = 5, 6, 12

BY_ROW, AS_IT_IS, ELSEWHERE = "each row has its request's", "the batch's own", "looked at elsewhere"
COLUMNS = ("temperature", "top_p", "top_k", "frequency_penalties", "presence_penalties", "repetition_penalties")
FIELDS = {
    **dict.fromkeys((*COLUMNS, "prompt_token_ids", "allowed_token_ids_mask", "bad_words_token_ids"), BY_ROW),
    **dict.fromkeys(("all_greedy", "all_random", "no_penalties"), AS_IT_IS),
    "generators": ELSEWHERE,  # noise comes from tapes
    "max_num_logprobs": ELSEWHERE,  # gathered from accepted rows alone
    "output_token_ids": "the request's and the node's ancestors",
    "logitsprocs": "vLLM's own are spread, others refused",
    "logprob_token_ids": ELSEWHERE,  # gathered from accepted rows alone
    "spec_token_ids": ELSEWHERE,  # vLLM knows of no drafts
    "thinking_budget_state_holder": "at root rows: who has a budget has no drafts",
}


def holder(rows: dict[int, int]) -> Any:
    """vLLM's, with a budget for some rows."""
    ids = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=[END, END])
    made = ThinkingBudgetStateHolder(ids, 4, 0, torch.device("cpu"), False)
    for row, budget in rows.items():
        made._state[row] = made._init_state_entry([1, 2], budget)
    return made


def metadata(**values: Any) -> SamplingMetadata:
    facts: dict[str, Any] = dict(
        **{name: torch.arange(3) + 1.0 for name in COLUMNS}, all_greedy=False, all_random=True, no_penalties=False,
        generators={0: torch.Generator()}, max_num_logprobs=3, prompt_token_ids=torch.arange(6).view(3, 2),
        output_token_ids=OUTPUTS, allowed_token_ids_mask=torch.eye(3, dtype=torch.bool),
        bad_words_token_ids={1: [[4]]}, logitsprocs=LogitsProcessors(), logprob_token_ids={0: [1]},
        spec_token_ids=[[], [], []], thinking_budget_state_holder=holder({0: 3}),
    )  # fmt: skip
    return SamplingMetadata(**{**facts, **values})


def spread(given: SamplingMetadata) -> SamplingMetadata:
    return _spread_metadata(given, TREES, OWNER, DEPTH, False)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingMetadata)])
def test_every_field_of_vllms_sampling_metadata_reaches_the_rows_of_drafts(name: str) -> None:
    kind = FIELDS[name]  # a new one: say what becomes of it
    given = metadata()
    before, after = getattr(given, name), getattr(spread(given), name)
    if kind == AS_IT_IS:
        assert after == before
    elif kind == BY_ROW and isinstance(before, dict):
        assert after == {row: before[owner] for row, owner in enumerate(OWNER.tolist()) if owner in before}
    elif kind == BY_ROW:
        assert torch.equal(after, before[torch.from_numpy(OWNER.astype(np.int64))])
    elif kind == ELSEWHERE:
        assert not after
    elif name == "output_token_ids":
        assert after == [[1], [2, 2], [2, 2, 7], [2, 2, 7, 8], [3], [3, 9]]
    elif name == "thinking_budget_state_holder":
        assert after._state == before._state and after is not before
    else:
        assert set(BUILTIN) == set(BUILTIN_LOGITS_PROCESSORS)


def test_the_table_names_no_field_that_is_gone() -> None:
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(SamplingMetadata)}


def forced(spread_out: Any, outputs: list[list[int]], rows: int) -> list[int]:
    """What each row must say; 0: whatever it likes."""
    logits = torch.zeros(rows, VOCABULARY)
    spread_out.update_state(outputs, None)
    return spread_out.apply_to_logits(logits, False, None).argmax(-1).tolist()


def test_budgets_beside_drafts_end_the_thinking_where_they_do_alone() -> None:
    both, alone = holder({0: 2, 2: 4}), {0: holder({0: 2}), 2: holder({0: 4})}
    texts: list[list[int]] = [[START], [1], [START]]
    ended = set()
    for step in range(9):
        has_drafts = step % 3 > 0
        if has_drafts:
            rows = spread(metadata(output_token_ids=texts, thinking_budget_state_holder=both))
            said = forced(rows.thinking_budget_state_holder, rows.output_token_ids, len(OWNER))
            roots = [said[int(TREES.node_start[r]) + r] for r in range(3)]
            assert [said[i] for i, depth in enumerate(DEPTH.tolist()) if depth] == [0, 0, 0]
        else:
            roots = forced(both, texts, 3)
        for request, own in alone.items():
            assert roots[request] == forced(own, [texts[request]], 1)[0], (step, request)
        ended |= {(request, step) for request in alone if roots[request] == END}
        texts = [[*text, said or 1] for text, said in zip(texts, roots, strict=True)]
    assert {request for request, _ in ended} == {0, 2} and len(ended) == 4


def test_a_request_that_moved_to_the_row_of_one_with_a_budget_has_none() -> None:
    batch = SimpleNamespace(thinking_budget_state_holder=holder({0: 2, 1: 2, 3: 1}), req_ids=["a", "b"], num_reqs=2)
    requests = {
        "a": SimpleNamespace(sampling_params=SimpleNamespace(thinking_token_budget=None)),
        "b": SimpleNamespace(sampling_params=SimpleNamespace(thinking_token_budget=2)),
    }
    clear_inherited(batch, requests)
    assert list(batch.thinking_budget_state_holder._state) == [1]


# --- V2: our verifier has vLLM's sampler process one row per node --------------------------------------------------

_NODE, _SETTING = "applied by `apply_sampling_params` to each row", "a setting, or what others are made of"
SETTINGS = ("logprobs_mode", "compute_nans", "use_fp64_gumbel", "req_states", "num_speculative_tokens")
SAMPLER = {
    **dict.fromkeys(("sampling_states", "logits_processors", "needs_logits_processing"), _NODE),
    "penalties_state": "chains only: its kernels look back over the rows before",
    "thinking_budget_state": "by `apply_sampling_params`; who has a budget has no drafts",
    "logprob_token_ids_state": "taken from the accepted rows",
    "trace_replay_state": "such requests have no drafts",
    **dict.fromkeys(SETTINGS, _SETTING),
    "return_sampling_mask": "made of the rows that a token was sampled from",
    **dict.fromkeys(("use_flashinfer", "use_xpu_sampler"), "left out where noise is to be that of a position"),
}
STATES = {
    "temperature": _NODE, "top_k": _NODE, "top_p": _NODE, "min_p": _NODE, "seeds": "the noise of each row's position",
    "seeds_set": "unseeded requests are given one", "num_logprobs": "taken from the accepted rows",
    "max_num_reqs": _SETTING, "vocab_size": _SETTING,
}  # fmt: skip
MODULES = {
    "bad_words", "batch_shard", "gumbel", "logit_bias", "logits_processor", "logprob", "min_p", "output", "penalties",
    "prompt_logprob", "sampler", "states", "thinking_budget", "trace_replay", "watermark",
}  # fmt: skip


def attributes(kind: type) -> set[str]:
    """What its `__init__` sets."""
    source = inspect.getsource(kind.__init__)  # type: ignore[misc]
    tree = ast.parse(textwrap.dedent(source))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_every_state_of_the_v2_runners_sampler_is_accounted_for() -> None:
    assert attributes(Sampler) == SAMPLER.keys()
    assert attributes(SamplingStates) == STATES.keys()
    assert {module.name for module in pkgutil.iter_modules(vllm.v1.worker.gpu.sample.__path__)} == MODULES
