"""Dumps: what a user's JSON lines may hold, and what of them was one rollout."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.replay.dump import read_answers, read_dump

TRACE = next((Path(__file__).parents[2] / "traces").glob("*.jsonl.zst"))
GRPO = sorted((Path(__file__).parents[2] / "traces" / "grpo").glob("*.jsonl.zst"))


@pytest.fixture
def dump(tmp_path):
    def write(*lines, name="dump.jsonl", end="\n"):
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        data = ("\n".join(texts) + end).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def line(prompt, answer, **more):
    return {"prompt_token_ids": prompt, "token_ids": answer, **more}


def spell(text, is_prompt):
    """A token for each letter; a prompt begins with 1."""
    return [1] * is_prompt + [ord(letter) for letter in text]


def test_token_ids_are_taken_as_they_are(dump):
    (rollout,) = read_dump(dump(line([5, 6], [7, 8, 9]), line([5, 6], [7])))
    first, second = rollout.answers
    assert first.prompt.tolist() == [5, 6] and first.answer.tolist() == [7, 8, 9]
    assert first.answer.dtype == np.int32
    assert first.problem_id == second.problem_id and rollout.epoch == 1


def test_texts_and_what_verl_writes_become_tokens(dump):
    path = dump({"prompt": "ab", "answer": "c"}, {"input": "ab", "output": "d", "gts": "d", "score": 1.0})
    (rollout,) = read_dump(path, spell)
    assert [one.prompt.tolist() for one in rollout.answers] == [[1, 97, 98]] * 2
    assert [one.answer.tolist() for one in rollout.answers] == [[99], [100]]


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.jsonl.gz"])
def test_blank_lines_and_a_missing_end_do_no_harm(dump, name):
    (rollout,) = read_dump(dump("", line([5], [6]), "  ", line([7], [8]), name=name, end=""))
    assert [one.answer.tolist() for one in rollout.answers] == [[6], [8]]


def test_what_a_rollout_adds_comes_next_time_and_a_half_written_line_when_it_is_whole(dump):
    path, half = dump(line([5], [6], version=3)), json.dumps(line([9], [7, 1]))
    ((number, own, _),) = read_answers(path)
    assert (number, own.version) == (1, 3)
    with path.open("a") as rollout:
        for text, prompts in ((json.dumps(line([8], [1])) + "\n" + half[:-1], [8]), (half[-1], [9]), ("\n\n", [])):
            rollout.write(text)
            rollout.flush()
            found = read_answers(path, after=number)
            assert [one.prompt.tolist() for _, _, one in found] == [[own] for own in prompts]
            number = found[-1][0] if found else number
    assert number == 3
    assert [one.prompt.tolist() for one in read_dump(path)[0].answers] == [[5], [8], [9]]


def test_a_token_that_the_model_has_not_is_refused_with_its_line(dump):
    path = dump(line([5], [6]), line([5], [24]))
    assert len(read_answers(path, vocab_size=25)) == 2
    with pytest.raises(SpecRolloutError, match="line 2 of .* has the token 24, and the model has 24"):
        read_answers(path, vocab_size=24)


def test_prompts_tell_problems_apart_unless_lines_name_them(dump):
    (rollout,) = read_dump(dump(line([5], [1]), line([6], [1]), line([5], [2])))
    a, b, c = (one.problem_id for one in rollout.answers)
    assert a == c != b
    (rollout,) = read_dump(dump(line([5], [1], problem_id=7), line([6], [1], problem_id="7")))
    assert {one.problem_id for one in rollout.answers} == {"7"}


def test_lines_of_one_epoch_and_step_are_a_rollout_wherever_they_stand(dump):
    path = dump(
        line([5], [1], epoch=2, step=1), line([5], [2], epoch=1, step=0), line([5], [3], epoch=2, step=1),
        line([6], [4], epoch=1, step=1),
    )  # fmt: skip
    rollouts = read_dump(path)
    assert [one.epoch for one in rollouts] == [1, 1, 2]
    assert [[answer.answer.tolist() for answer in one.answers] for one in rollouts] == [[[2]], [[4]], [[1], [3]]]


def test_steps_alone_tell_epochs_by_the_problems_that_come_back(dump):
    steps = ([5, 6], [7, 8], [6, 5], [7, 9, 8])
    rollouts = read_dump(dump(*(line([p], [1], step=i) for i, problems in enumerate(steps) for p in problems)))
    assert [one.epoch for one in rollouts] == [1, 1, 2, 2]


def test_an_empty_answer_is_no_answer(dump):
    (rollout,) = read_dump(dump(line([5], []), line([5], [1])))
    assert len(rollout.answers) == 1


@pytest.mark.parametrize(
    ("lines", "words", "way"),
    [
        ([line([5], [1]), "plain text"], "line 2 of `.*` is no answer", "prompt_token_ids"),
        ([line([5], [1]), line([5], [-1])], "line 2 of `.*` is no answer: .*>= 0", "token_ids"),
        ([line([5], [1], version="x")], r"line 1 of `.*` is no answer: .*version", "version"),
        ([line([5], [1]), [1, 2]], "line 2 of `.*` is no answer", "prompt"),
        ([{"prompt": "a"}], "line 1 of `.*` has no answer", "answer"),
        ([{"answer": "a"}], "line 1 of `.*` has no prompt", "prompt"),
        ([line([], [1])], "line 1 of `.*` has an empty prompt", "a token"),
        ([line([5], [1], epoch=1), line([5], [1])], "line 2 of `.*` has no `epoch`, and the first", "every line"),
        ([line([5], [1]), line([5], [1], step=1)], "line 2 of `.*` has a `step`, and the first", "every line"),
        ([{"prompt": "a", "answer": "b"}], "line 1 of `.*` has its prompt as 'a', and no model", "try MODEL --from"),
        ([line([5], [])], "holds no answer", "a line for each answer"),
        (["[" * 100_000], "line 1 of `.*` is no answer", "prompt"),
    ],
)
def test_what_is_no_answer_is_one_clear_error_with_its_line(dump, lines, words, way):
    with pytest.raises(SpecRolloutError, match=words) as error:
        read_dump(dump(*lines))
    assert way in error.value.hint


def test_a_recorded_trace_is_sent_to_the_command_that_takes_it():
    with pytest.raises(SpecRolloutError, match="is a recorded trace") as error:
        read_dump(TRACE)
    assert f"specrollout replay {TRACE}" in error.value.hint


def test_files_that_cannot_be_read_or_unpacked_are_errors(tmp_path):
    with pytest.raises(SpecRolloutError, match="cannot be read"):
        read_dump(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(SpecRolloutError, match="cannot be unpacked") as error:
        read_dump(tmp_path / "bad.jsonl.gz")
    assert "prompt_token_ids" in error.value.hint
