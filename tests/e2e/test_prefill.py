"""Answers computed once more by the engine that gave them: their hidden states, and what users notice of it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT

from tests.e2e.identity.engines import Engine, engine
from vllm_specrollout.config.marking import KEY
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.server import prefill as asking
from vllm_specrollout.server.prefill import prefill
from vllm_specrollout.server.reports import read_history
from vllm_specrollout.training.answers import AnswerRing
from vllm_specrollout.training.rows import Rows, RowSource

POLICY = CHECKPOINT.parent
HEAD = {"method": "eagle3", "model": str(POLICY / "head"), "num_speculative_tokens": 4}
LAYERS = (1, 2, 3)
PROMPTS = ["12+34=", "7*8+5=", "99-45=", "3+4*5=", "(8-2)*7=", "81-9*9="]
STEP = 24  # tokens of a step of prefill, so that answers come in parts
ALL = 1 << 16


def opened(spec_rollout: dict[str, Any], is_ours: bool = True) -> Any:
    own = {"drafters": ["history", "ngram"], "train": {"prefill_tokens": STEP}, **spec_rollout}
    return engine(str(POLICY / "checkpoint"), "float32", is_ours, own, block_size=32, max_model_len=256)


@pytest.fixture(scope="module")
def ours() -> Iterator[Engine]:
    with opened({"speculative_config": HEAD}) as one:
        yield one


class Trainer:
    """The other end: it takes what comes, in a thread."""

    def __init__(self, folder: Path, ours: Engine) -> None:
        self.address, self.rows = f"ipc://{folder}/rows", list[Rows]()
        self.source = RowSource(self.address)
        ours.runner.tap = None
        kept = ours.runner.spec_rollout.listeners
        kept[:] = [one for one in kept if not isinstance(one, AnswerRing)]
        # from the first call on, answers are kept
        assert prefill(ours.llm, self.address, 1) == {"asked": 0, "computed": 0}
        self.sink = ours.runner.tap.sink
        assert self.sink._socket.poll(5000, 2), "the other end is there"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set() or max(self.source._next.values(), default=0) < self.sink.sent:
            self.rows += self.source.arrived(0.05)

    def close(self) -> list[Rows]:
        """All that came."""
        self._is_over.set()
        self._thread.join(30)
        assert self.source.lost == self.sink.dropped == 0
        return self.rows


@contextlib.contextmanager
def training(folder: Path, ours: Engine) -> Iterator[Trainer]:
    made = Trainer(folder, ours)
    try:
        yield made
    finally:
        made.close()
        made.source.close()


def users(seed: int) -> list[SamplingParams]:
    """Greedy, with a seed, and without one, which is then drawn in the order of arrival."""
    more: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": seed}, {"top_p": 0.9}]
    return [SamplingParams(max_tokens=64, **more[i % 3]) for i in range(len(PROMPTS))]


def ask(ours: Engine, seed: int = 0) -> list[list[int]]:
    outputs = ours.llm.generate(PROMPTS, users(seed), use_tqdm=False)
    ours.llm.llm_engine.step()  # which tells the workers that the last one has ended
    return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]


@functools.cache
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY / "checkpoint", dtype=torch.float32).eval()


def farthest(rows: Rows, has_layers: bool) -> float:
    """From transformers' hidden states."""
    with torch.no_grad():
        out = reference().model(rows.token_ids[None].long(), output_hidden_states=True)
    layers = [out.hidden_states[i][0] for i in LAYERS] if has_layers else []
    truth = torch.stack([*layers, out.last_hidden_state[0]], dim=1)
    assert rows.hidden.shape == truth.shape and rows.hidden.dtype is torch.float32
    return float((rows.hidden - truth).abs().max())


def token_ids(found: list[Rows]) -> list[list[int]]:
    return sorted(rows.token_ids.tolist() for rows in found)


# those with engines of their own come first: two at once share vLLM's groups of ranks


def test_without_a_head_the_last_hidden_states_come_alone(tmp_path: Path) -> None:
    with opened({}) as ours, training(tmp_path, ours) as trainer:
        answers = ask(ours)
        prefill(ours.llm, trainer.address, ALL)
        found = trainer.close()
    assert token_ids(found) == sorted(answers)
    assert max(farthest(rows, has_layers=False) for rows in found) < 1e-4


def test_users_get_stocks_tokens_with_prefill_in_between(tmp_path: Path) -> None:
    with opened({}, is_ours=False) as stock:
        truth = [ask(stock, seed=i) for i in range(3)]
    got = []
    with opened({"speculative_config": HEAD}) as ours, training(tmp_path, ours) as trainer:
        for i in range(3):
            got.append(ask(ours, seed=i))
            prefill(ours.llm, trainer.address, ALL)
        assert ours.runner.metrics.total.tokens_per_step > 1.0
        # of what is prefilled, nothing is an answer
        history = read_history(ours.llm)["total"]["store"]
    seeded = [i for i, one in enumerate(users(0)) if one.temperature == 0.0 or one.seed is not None]
    assert history["answers"] == 3 * len(PROMPTS)
    assert [[turn[i] for i in seeded] for turn in got] == [[turn[i] for i in seeded] for turn in truth]


def test_rows_are_those_of_transformers_in_parts_and_beside_a_prefix_cache(ours: Engine, tmp_path: Path) -> None:
    with training(tmp_path, ours) as trainer:
        answers = ask(ours)
        done = prefill(ours.llm, trainer.address, ALL)
        # what a trainer has whole is not handed out again
        assert prefill(ours.llm, trainer.address, ALL) == {"asked": 0, "computed": 0}
        ours.runner.tap.ring._times = dict.fromkeys(ours.runner.tap.ring._times, 0)
        # once more, with all of it in the prefix cache
        assert prefill(ours.llm, trainer.address, ALL) == done
        found = trainer.close()
    assert done["asked"] == done["computed"] == sum(map(len, answers))
    assert token_ids(found) == sorted([*answers, *answers])
    assert any(len(rows) > 2 * STEP for rows in found)
    assert max(farthest(rows, has_layers=True) for rows in found) < 1e-4
    assert {rows.version for rows in found} == {ours.runner.weights_version.number}
    tokenizer = ours.llm.get_tokenizer()
    prompts = {tuple(tokenizer(text)["input_ids"]) for text in PROMPTS}
    assert {tuple(rows.token_ids[: rows.prompt_tokens].tolist()) for rows in found} == prompts


def marked(ours: Engine, trainer: Trainer) -> list[str]:
    """Have the engine begin a turn without waiting for it."""
    (found,) = ours.llm.collective_rpc("spec_rollout_answers", args=(trainer.address, ALL))
    names = []
    for number, (prompt, params) in enumerate(asking.requests_of(found)):
        names.append(f"rows-{number}")
        ours.llm.llm_engine.add_request(names[-1], prompt, params)
    return names


def scheduler_of(ours: Engine) -> Any:
    return ours.llm.llm_engine.engine_core.engine_core.scheduler


def test_a_request_that_arrives_ends_the_turn_and_has_the_engine_for_itself(ours: Engine, tmp_path: Path) -> None:
    core, scheduler = ours.llm.llm_engine, scheduler_of(ours)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    alone = ours.llm.generate("15*4=", params, use_tqdm=False)[0].outputs[0].token_ids
    with training(tmp_path, ours) as trainer:
        answers = ask(ours)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        names = marked(ours, trainer)
        ends: dict[str, Any] = {}
        for _ in range(2):
            ends |= {one.request_id: one.outputs[0] for one in core.step() if one.finished}
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < free
        before = set(ends)
        assert len(before) < len(names)
        core.add_request("user", "15*4=", params)
        ends |= {one.request_id: one.outputs[0] for one in core.step() if one.finished}
        assert not scheduler.marked and len(scheduler.requests) == 1
        while core.has_unfinished_requests():
            ends |= {one.request_id: one.outputs[0] for one in core.step() if one.finished}
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        found = trainer.close()
    assert {name: ends[name].finish_reason for name in names} == {
        name: "length" if name in before else "abort" for name in names
    }
    assert list(ends["user"].token_ids) == list(alone)
    # those that were whole by then
    assert len(found) == len(before) and all(rows.token_ids.tolist() in answers for rows in found)


def test_one_that_comes_while_others_run_is_ended_at_once(ours: Engine, tmp_path: Path) -> None:
    core = ours.llm.llm_engine
    with training(tmp_path, ours) as trainer:
        ask(ours)
        core.add_request("user", "15*4=", SamplingParams(temperature=0.0, max_tokens=8))
        core.step()
        names = marked(ours, trainer)
        ends = {one.request_id: one.outputs[0].finish_reason for one in core.step() if one.finished}
        assert {name: ends.get(name) for name in names} == dict.fromkeys(names, "abort")
        while core.has_unfinished_requests():
            core.step()
        assert trainer.close() == []


def test_rows_of_other_weights_than_were_asked_for_are_not_sent(ours: Engine, tmp_path: Path) -> None:
    core = ours.llm.llm_engine
    with training(tmp_path, ours) as trainer:
        ask(ours)
        names = marked(ours, trainer)
        version = ours.runner.weights_version
        version.number += 1
        while core.has_unfinished_requests():
            core.step()
        assert names and trainer.sink.sent == 0
        # of the version before, those stand in that are longer than all of this one: there is none of this one yet
        assert prefill(ours.llm, trainer.address, ALL)["computed"] > 0
        found = trainer.close()
    assert {rows.version for rows in found} == {version.number}


def test_a_trainer_that_lets_the_cache_go_ends_the_turn(ours: Engine, tmp_path: Path) -> None:
    core, scheduler = ours.llm.llm_engine, scheduler_of(ours)
    with training(tmp_path, ours) as trainer:
        ask(ours)
        names = marked(ours, trainer)
        core.step()
        assert scheduler.marked and ours.llm.reset_prefix_cache()
        ends = {one.request_id: one.outputs[0].finish_reason for one in core.step() if one.finished}
        assert not scheduler.marked and "abort" in ends.values() and set(ends) <= set(names)
    assert not core.has_unfinished_requests()


def test_nobody_else_may_mark_a_request(ours: Engine) -> None:
    params = SamplingParams(max_tokens=1, extra_args={KEY: {"prompt_tokens": 1, "version": 0}})
    with pytest.raises(ConfigError) as error:
        ours.llm.generate("1+1=", params, use_tqdm=False)
    assert str(error.value) == "`spec_rollout_rows` in `extra_args` is the engine's own\n\nhint: leave it out"
    assert not ours.llm.llm_engine.has_unfinished_requests()


def test_what_tokens_do_not_tell_and_what_is_no_address_is_refused(
    ours: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="is no address for rows"):
        prefill(ours.llm, "tcp://127.0.0.1:1", 1)
    with pytest.raises(ConfigError, match="`most_tokens` is 0"):
        prefill(ours.llm, f"ipc://{tmp_path}/rows", 0)
    monkeypatch.setattr(ours.runner.vllm_config, "lora_config", object())
    with pytest.raises(UnsupportedError, match=r"may have adapters \(`--enable-lora`\)"):
        prefill(ours.llm, f"ipc://{tmp_path}/rows", 1)
