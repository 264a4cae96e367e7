"""What an engine learns that nobody tells it: a trainer that drives vLLM in its own ways, and knows nothing of us."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.schedules import Trainer
from vllm_specrollout import resumed
from vllm_specrollout.history.problems import prompt_hash
from vllm_specrollout.types import Answer

SCHEDULES = 200
PROMPTS = [[9 + i, 40, 41, 42, 9 + i, 40, 41, 42, 9 + i] for i in range(4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.mktemp("models"), "qwen3", "float32")


@pytest.fixture(scope="module")
def ours(path: str) -> Iterator[Engine]:
    """With a trainer's own methods of the worker."""
    settings = {"drafters": ["history", "ngram"], "max_draft_tokens": 8, "ngram": {"min_match": 1}}
    more = {"worker_extension_cls": "tests.e2e.workers.TrainersExtension", "max_num_seqs": 6}
    with engine(path, "float32", is_ours=True, spec_rollout=settings, **more) as one:
        yield one


def call(ours: Engine, name: str, *args: Any) -> Any:
    return ours.llm.collective_rpc(name, args=args)[0]


def endings(ours: Engine) -> list[Answer]:
    """What drafters are told from now on."""
    found: list[Answer] = []
    drafter = ours.runner.spec_rollout.drafters[0]
    finish = type(drafter).finish

    def finishing(ending: Answer) -> None:
        found.append(ending)
        finish(drafter, ending)

    drafter.finish = finishing
    return found


def rollout(ours: Engine, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(**{"seed": 3, "max_tokens": 8, "ignore_eos": True, **params})
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in ours.llm.generate(asked, sampling, use_tqdm=False)]


def test_weights_written_in_place_are_another_policy_and_its_pass_over_the_problems_another_epoch(
    ours: Engine,
) -> None:
    version, history = ours.runner.weights_version, ours.runner.spec_rollout.drafters[0].store
    call(ours, "write_in_place", 0)
    rollout(ours, [[7, 7, 7]])
    told = endings(ours)
    before = rollout(ours)
    number, epoch = version.number, history.epoch
    # signs of nothing
    ours.llm.reset_prefix_cache()
    call(ours, "refit_later")
    assert rollout(ours) == before
    assert (version.number, history.epoch) == (number, epoch)
    # written past vLLM, and the old keys and values dropped
    ours.runner.get_model().model.norm.weight.data.mul_(1.3)
    ours.llm.reset_prefix_cache()
    assert rollout(ours) != before
    assert (version.number, history.epoch) == (number + 1, epoch + 1)
    # by a method of the trainer's, and without a sign: nothing ran meanwhile
    call(ours, "write_in_place", 7)
    rollout(ours)
    ours.runner.get_model().model.norm.weight.data.mul_(1.3)
    rollout(ours)
    assert (version.number, history.epoch) == (number + 3, epoch + 3)
    call(ours, "write_in_place", 0)
    ours.llm.reset_prefix_cache()
    assert rollout(ours) == before
    # the answers are those of the weights that made them, though they are told of when the next step begins
    rollout(ours, [[7, 7, 7]])
    counts = {number: 2 * len(PROMPTS), **{number + pushed: len(PROMPTS) for pushed in (1, 2, 3, 4)}}
    told = [ending for ending in told if ending.prompt_ids.tolist() in PROMPTS]
    assert Counter(ending.weights_version for ending in told) == counts


def test_interrupted_answers_and_next_turns_are_of_the_problem_that_they_go_on_from(ours: Engine) -> None:
    told, history = endings(ours), ours.runner.spec_rollout.drafters[0].store
    epoch = history.epoch
    first = rollout(ours, temperature=0.0)
    before = {ending.name for ending in told if ending.prompt_ids.tolist() not in PROMPTS}
    call(ours, "write_in_place", 3)
    # as trainers do it: prompt and answer so far, under a new id; and the next turn of a conversation
    rollout(ours, [[*prompt, *answer[:5]] for prompt, answer in zip(PROMPTS, first, strict=True)], temperature=0.0)
    turn = [*PROMPTS[0], *first[0], 60, 61]
    rollout(ours, [turn])
    rollout(ours, [[9, 9, 9, 9]])
    counts = {prompt_hash(prompt): 2 for prompt in PROMPTS}
    counts[prompt_hash(PROMPTS[0])] += 1
    assert Counter(ending.problem_id for ending in told if ending.name not in before) == counts
    # no problem has come back: the pass over them goes on
    assert history.epoch == epoch
    call(ours, "write_in_place", 0)


@pytest.mark.nightly
def test_random_schedules_of_what_trainers_do_change_no_token_and_no_attribution(ours: Engine) -> None:
    trainer = Trainer(ours, PROMPTS)
    for seed in range(SCHEDULES):
        trainer.carry_out(seed)
    trainer.check()
    # what was meant to happen has happened, and often
    assert all(trainer.did[what] >= SCHEDULES // 8 for what in ("abort", "push", "pause", "reset", "empty sign"))
    assert all(trainer.did[f"pause, {mode}"] >= SCHEDULES // 16 for mode in ("keep", "abort", "wait"))
    assert trainer.did["went on"] > SCHEDULES // 2 and trainer.did["whole"] > SCHEDULES
    assert trainer.did["load"] > SCHEDULES // 8 and trainer.did["told"] > SCHEDULES


def test_a_kv_connector_that_moves_prompts_changes_no_token(path: str, tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    prompts = [[9 + i, *([40, 41, 42, 43] * 25)] for i in range(3)]
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    own: dict[str, Any] = {"enable_prefix_caching": False, "block_size": 32}
    with engine(path, "float32", is_ours=False, **own) as stock:
        truth = rollout(stock, prompts, max_tokens=24)
    settings = {"drafters": ["history", "ngram"], "ngram": {"min_match": 1}}
    with engine(path, "float32", is_ours=True, spec_rollout=settings, kv_transfer_config=connector, **own) as ours:
        assert rollout(ours, prompts, max_tokens=24) == truth
        assert len(list(tmp_path.glob("*/*.safetensors"))) > 0
        # loaded from there now, and drafted from earlier answers
        outputs = ours.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(seed=3, max_tokens=24, ignore_eos=True),
            use_tqdm=False,
        )
        assert [list(one.outputs[0].token_ids) for one in outputs] == truth
        assert all(one.num_cached_tokens == 96 for one in outputs)
        assert ours.runner.stats.accepted > 0


def test_a_kv_connector_and_the_prefix_cache_change_no_token_of_a_resumed_answer(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig

    prompts = [[9 + i, *([40, 41, 42, 43] * 25)] for i in range(3)]
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    settings = {"drafters": ["history", "ngram"], "ngram": {"min_match": 1}}
    own: dict[str, Any] = {"kv_transfer_config": connector, "enable_prefix_caching": True, "block_size": 32}
    with engine(path, "float32", is_ours=True, spec_rollout=settings, **own) as ours:
        connector_of = ours.llm.llm_engine.engine_core.engine_core.scheduler.connector
        match, matched = connector_of.get_num_new_matched_tokens, []
        monkeypatch.setattr(
            connector_of, "get_num_new_matched_tokens", lambda *a: matched.append(match(*a)) or matched[-1]
        )
        truth = rollout(ours, prompts, max_tokens=80)
        # so much of each answer is cached here that it is more than the connector knows of its prompt
        for count in (40, 70, 3):
            asked = [
                resumed(SamplingParams(seed=3, max_tokens=80, ignore_eos=True), prompt, answer[:count])
                for prompt, answer in zip(prompts, truth, strict=True)
            ]
            outputs = ours.llm.generate(
                [{"prompt_token_ids": one[0]} for one in asked], [one[1] for one in asked], use_tqdm=False
            )
            assert [list(one.outputs[0].token_ids) for one in outputs] == [answer[count:] for answer in truth]
        assert ours.runner.stats.accepted > 0
        # a count of hits that falls ends a server's metrics
        assert len(matched) == 4 * len(prompts) and min(count for count, _ in matched) >= 0
