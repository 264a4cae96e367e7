"""What a model that drafts is fed with and asked for: nothing behind its context, and nobody whose rows were lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import batch_of, chain
from vllm_specrollout.drafters.base import UNBOUNDED
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import DraftLimits, DraftMode, RequestBatch, RequestView, TreeBatch, VerifyResult
from vllm_specrollout.worker.models.drafter import MOST_UNMET, MOST_UNSOUND, ModelDrafter
from vllm_specrollout.worker.models.proposing import (
    HeldRows,
    Proposer,
    Seat,
    check_layers,
    have_prompts,
    most_tokens,
    rows_that_hold,
    without_adapters,
)

LEVELS, TARGET, VOCAB = 3, 512, 8


def of_vllm(method: str = "draft_model", context: int = 24, asked: int | None = None, positions: int = 0) -> Any:
    """vLLM's proposer, as far as its configuration is asked for."""
    own = SimpleNamespace(
        max_model_len=context, hf_config=SimpleNamespace(max_position_embeddings=positions or context)
    )
    given = SimpleNamespace(method=method, max_model_len=asked, draft_model_config=own)
    model = SimpleNamespace(max_model_len=TARGET)
    return SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=given, model_config=model))


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"context": 96}, 96 - LEVELS),
        ({"context": 64, "asked": 64, "positions": 96}, 64 - LEVELS),
        ({"context": TARGET}, UNBOUNDED),
        ({"context": 2}, 0),
        # vLLM gives a head as many positions as its target has, unless the user says something else
        ({"method": "eagle3", "context": 96, "positions": TARGET}, UNBOUNDED),
        ({"method": "eagle", "context": 96, "asked": 96, "positions": TARGET}, 96 - LEVELS),
        # of other methods, the model's own configuration holds
        ({"method": "dflash", "context": 96, "positions": TARGET}, 96 - LEVELS),
    ],
)
def test_a_request_and_a_whole_draft_fit_into_the_models_context(given: dict[str, Any], most: int) -> None:
    assert most_tokens(of_vllm(**given), LEVELS) == most


class Notes(Proposer):
    """Notes which tokens the model is given, and where."""

    def __init__(self, context: int = 24) -> None:
        super().__init__(of_vllm(context=context), max_depth=LEVELS, max_rows=64, extra=1)
        # request -> position -> the token there, and the one behind it
        self.seen: dict[str, dict[int, tuple[int, int]]] = {}
        self.asked: list[tuple[str, int]] = []
        self.logits = torch.zeros(VOCAB)
        self.error: Exception | None = None

    def _pass(self, seats: Any, rows: HeldRows, index: Any, next_tokens: np.ndarray, depth: int) -> None:
        if self.error is not None:
            raise self.error
        for seat, own, after in zip(seats, index, next_tokens.tolist(), strict=True):
            name, tokens = seat.entry.view.request_id, [*rows.token_ids[own].tolist(), after]
            places = rows.positions[own].tolist()
            self.seen.setdefault(name, {}).update(zip(places, zip(tokens, tokens[1:], strict=False), strict=True))
            if depth:
                self.asked.append((name, places[-1] + 2))
        for _ in range(depth):
            self.draw(self.logits.expand(len(seats), VOCAB))


class Engine:
    """Requests whose token at a position is that position times ten, decoded beside a model that drafts."""

    def __init__(self, proposer: Notes) -> None:
        noise = SimpleNamespace(ahead=lambda tokens, entries, depth: torch.zeros(tokens.shape))
        ranks = SimpleNamespace(are_several=False, drawing=lambda draw: draw, follow=lambda run: None)
        ranks.order = lambda names, depth: None
        self.model = ModelDrafter(proposer, noise, 0, ranks)  # type: ignore[arg-type]
        self.computed: dict[str, int] = {}

    def step(self, rows: dict[str, int]) -> None:
        """So many rows of each request are computed, and the model is asked for all of them."""
        positions: list[int] = []
        for name, count in rows.items():
            begin = self.computed.get(name, 0)
            positions += range(begin, begin + count)
            self.computed[name] = begin + count

        def seat_of(i: int, name: str) -> Seat:
            view, admission = SimpleNamespace(request_id=name), SimpleNamespace(shape=DraftMode.TREE)
            entry = SimpleNamespace(view=view, admission=admission, is_greedy=True, temperature=0.0)
            after = self.computed[name]
            return Seat(entry, i, 0, 10 * min(after, self.model.most_tokens), after)

        def columns_of(index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            places = torch.tensor(positions)[torch.from_numpy(index)]
            return (places * 10).int(), places.long(), torch.empty(len(index), 0)

        starts = np.concatenate([[0], np.cumsum(list(rows.values()))]).astype(np.int32)
        index, counts = rows_that_hold(starts, None, None)
        seats = [seat_of(i, name) for i, name in enumerate(rows)]
        self.model.feed_step(seats, counts, have_prompts(starts, None).tolist(), index, columns_of)

    def propose(self) -> TreeBatch:
        names = list(self.model.seats)
        views = [RequestView(name, np.zeros(4, np.int32), 2, 99) for name in names]
        batch = RequestBatch.of(views)
        whole = np.full(len(names), LEVELS, np.int32)
        trees = self.model.propose(batch, DraftLimits(2 * whole, whole, np.zeros(len(names), np.bool_)))
        self.model.flush_if_due()
        return trees


@given(st.data())
def test_the_model_sees_all_of_its_context_and_nothing_behind_it(data: st.DataObject) -> None:
    context = data.draw(st.integers(LEVELS, 30))
    notes = Notes(context)
    engine, most = Engine(notes), context - LEVELS
    for _ in range(data.draw(st.integers(1, 14))):
        names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
        engine.step({name: data.draw(st.integers(1, 9)) for name in names})
        engine.model.flush_if_due() if data.draw(st.booleans()) else engine.propose()
        if gone := data.draw(st.sampled_from(["", "", "", *engine.computed])):
            # over, or preempted and computed anew
            engine.model.forget(gone)
            del engine.computed[gone]
            notes.seen.pop(gone, None)
    assert all(length + LEVELS <= context for _, length in notes.asked)
    for own in notes.seen.values():
        assert own == {at: (10 * at, 10 * at + 10) for at in own} and max(own) < most
    for name, length in engine.computed.items():
        if length >= most > 0:
            # blocks that shorter requests share are whole
            assert sorted(notes.seen.get(name, {})) == list(range(most))
            assert name not in engine.model.waiting.request_ids()


def test_a_pass_that_fails_costs_its_own_requests_their_drafts_and_nobody_elses() -> None:
    notes = Notes()
    engine = Engine(notes)
    engine.step({"a": 4, "b": 4})
    engine.model.flush_if_due()
    engine.step({"a": 1, "b": 1})
    notes.error = RuntimeError("the adapter's rows are others")
    with pytest.raises(RuntimeError, match="adapter"):
        engine.propose()
    notes.error = None
    engine.step({"a": 1, "b": 1, "c": 4})
    assert engine.propose().sizes.tolist() == [0, 0, 2 * LEVELS]
    # rows are missing of it, until it is computed anew
    engine.model.forget("a")
    engine.computed["a"] = 0
    engine.step({"a": 6, "b": 1, "c": 1})
    assert engine.propose().sizes.tolist() == [2 * LEVELS, 0, 2 * LEVELS]


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_a_model_whose_logits_are_no_numbers_is_named_after_some_rows(worst: float) -> None:
    notes = Notes()
    engine = Engine(notes)
    notes.logits = torch.tensor([0.0] * (VOCAB - 1) + [worst])
    requests = {f"r{i}": 2 for i in range(MOST_UNSOUND // LEVELS // 2 + 1)}
    engine.step(requests)
    trees = engine.propose()
    assert trees.num_nodes and np.isfinite(trees.log_q).all(), "until then its tokens are as good as any"
    engine.step(dict.fromkeys(requests, 1))
    with pytest.raises(RuntimeError, match=f"no numbers in {MOST_UNSOUND} rows"):
        engine.propose()
    # and so again, should it come back as it is; a token that may not be chosen is no fault
    notes.logits = torch.tensor([0.0] * (VOCAB - 1) + [-float("inf")])
    for _ in range(4):
        engine.step(dict.fromkeys(requests, 1))
        assert engine.propose().num_nodes


def verdict(num_nodes: int, num_accepted: int, source: int) -> tuple[TreeBatch, VerifyResult]:
    """One chain of that drafter's, and how much of it was accepted."""
    trees = batch_of([chain([1] * num_nodes, source)], ["r"])
    return trees, VerifyResult(np.asarray([num_accepted], np.int32), np.arange(num_accepted, dtype=np.int32))


def test_a_model_that_meets_nothing_any_more_is_named_and_one_that_never_did_is_not() -> None:
    model, half = Engine(Notes()).model, MOST_UNMET // 64
    for _ in range(2 * half):
        model.observe(*verdict(64, 0, 0))
    model.observe(*verdict(2, 1, 1))
    for _ in range(2 * half - 1):
        model.observe(*verdict(32, 0, 0))
        model.observe(*verdict(64, 3, 5))
    with pytest.raises(RuntimeError, match=f"none of {MOST_UNMET}"):
        for _ in range(half):
            model.observe(*verdict(64, 0, 0))
    model.renew()
    for _ in range(2 * half):
        model.observe(*verdict(64, 0, 0))


class Wrapped(torch.nn.Module):
    """A module of the target's with adapters."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def test_a_head_has_the_targets_modules_without_adapters() -> None:
    target, head = torch.nn.Module(), torch.nn.Module()
    own, embedding, output = torch.nn.Linear(2, 2), torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)
    target.embed, target.lm_head = Wrapped(embedding), Wrapped(output)
    head.inner, head.lm_head, head.norm = torch.nn.Module(), target.lm_head, Wrapped(own)
    head.inner.embed = target.embed
    without_adapters(head, target)
    assert head.inner.embed is embedding and head.lm_head is output
    assert isinstance(head.norm, Wrapped) and isinstance(target.embed, Wrapped) and target.lm_head.base_layer is output


def test_a_model_with_a_sliding_window_does_not_draft_and_its_targets_windows_do_no_harm() -> None:
    layers = {
        name: SimpleNamespace(sliding_window=own) for name, own in (("target", 128), ("head", None), ("two", 128))
    }
    runner = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(UnsupportedError, match="sliding window"):
        check_layers(runner, ["head", "two"])
    check_layers(runner, ["head"])
    check_layers(runner, [])
