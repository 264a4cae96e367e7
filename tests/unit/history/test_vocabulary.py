"""Answers of another model's vocabulary never draft: their files are left out, and their tokens looked at."""

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.drafters import ask
from tests.unit.history.poisoned import change, filled
from tests.unit.history.stored import names
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.database import Database, ForeignError, HistoryError
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.types import Answer, DraftMode, FinishReason, RequestView

SMALL = Vocabulary("small", 512, "a1")
SMALL_LATER = Vocabulary("small/checkpoint-7", 512, "a1")
LARGE = Vocabulary("large", 150_000, "b2")


def _store(folder: Path, vocabulary: Vocabulary) -> HistoryStore:
    return HistoryStore(HistoryConfig(dir=str(folder)), vocabulary=vocabulary)


def test_a_vocabulary_fits_by_its_tokens_and_by_its_size_where_those_are_not_known():
    assert SMALL.fits(SMALL_LATER) and not SMALL.fits(LARGE)
    # embeddings may be padded
    assert SMALL.fits(Vocabulary("padded", 640, "a1"))
    assert not SMALL.fits(Vocabulary("of the same size", 512, "c3"))
    assert SMALL.fits(Vocabulary("without tokenizer", 512)) and not SMALL.fits(Vocabulary("without tokenizer", 640))
    assert SMALL.fits(ANY_VOCABULARY) and ANY_VOCABULARY.fits(SMALL)


def test_every_file_names_its_writers_model_and_keeps_doing_so(tmp_path, make_answer):
    path = tmp_path / "answers-0000.history"
    filled(path, make_answer("a"), make_answer("b", epoch=1), vocabulary=SMALL)
    upkeep.trim([path], 1)
    assert Database(path).vocabulary == SMALL
    report = upkeep.inspect(path)
    assert (report.model, report.vocab_size, report.answers) == ("small", 512, 1)


@pytest.mark.parametrize("change_", ["size='many'", "model=NULL", "digest=x'00'"])
def test_a_file_that_does_not_say_whose_it_is_is_damaged(tmp_path, change_):
    change(path := filled(tmp_path / "a.history", vocabulary=SMALL), f"UPDATE about SET {change_}")
    with pytest.raises(HistoryError, match="is damaged: it does not say whose it is"):
        Database(path)


def test_a_file_of_another_vocabulary_is_neither_read_nor_written_and_named_once(tmp_path, make_answer, caplog):
    theirs = make_answer("theirs", token_ids=np.arange(5, dtype=np.int32))
    before = (path := filled(tmp_path / "answers-0000.history", theirs, vocabulary=LARGE)).read_bytes()
    with caplog.at_level(logging.WARNING):
        store = _store(tmp_path, SMALL)
        store.append(make_answer("ours", token_ids=np.arange(5, dtype=np.int32)))
        store.begin_epoch()
    assert names(store) == ["ours"]
    assert store.stats().foreign_files == 1
    assert caplog.text.count("which has another vocabulary than `small`") == 1 and "`large`" in caplog.text
    store.close()
    assert path.read_bytes() == before
    with pytest.raises(ForeignError, match="another vocabulary"):
        Database(path, True, SMALL)


def test_a_later_checkpoint_goes_on_with_its_models_file(tmp_path, make_answer):
    answer = make_answer("a", token_ids=np.arange(5, dtype=np.int32))
    path = filled(tmp_path / "answers-0000.history", answer, vocabulary=SMALL)
    store = _store(tmp_path, SMALL_LATER)
    assert names(store) == ["a"]
    assert store._folder.own.path == path
    store.close()


def test_files_that_do_not_say_whose_they_are_are_read_and_tokens_that_the_model_lacks_are_not(
    tmp_path, make_answer, caplog
):
    tokens = {"ours": [11, 12], "beyond": [11, 512], "below": [-7], "largest": [2**31 - 1], "last": [511]}
    answers = [make_answer(name, token_ids=np.asarray(ids, np.int32)) for name, ids in tokens.items()]
    tail = make_answer("tail", token_ids=np.zeros(1, np.int32), prompt_ids=np.asarray([4, 9000], np.int32))
    filled(tmp_path / "answers-0000.history", *answers, tail)
    store = _store(tmp_path, SMALL)
    with caplog.at_level(logging.WARNING):
        assert names(store) == ["ours", "last"]
        assert names(store) == ["ours", "last"]
    assert store.stats().foreign_answers == 8 and caplog.text.count("outside the model's vocabulary of 512") == 1
    # what it writes itself goes to a file that says whose it is
    store.append(make_answer("new", token_ids=np.zeros(1, np.int32)))
    store.close()
    assert Database(tmp_path / "answers-0000.history").vocabulary == ANY_VOCABULARY
    assert Database(tmp_path / "answers-0001.history").vocabulary == SMALL


def test_foreign_history_never_becomes_a_draft(tmp_path):
    config = HistoryConfig(dir=str(tmp_path))
    other = HistoryDrafter(config)
    prompt, answer = np.asarray([5, 6, 7], np.int32), np.asarray([11, 149_999, -7, 2**31 - 1, 12], np.int32)
    other.finish(Answer("r0", "aime-7", prompt, answer, FinishReason.FINISHED, 0, "cmpl-0"))
    sound = np.asarray([11, 13, 14], np.int32)
    other.finish(Answer("r1", "aime-7", prompt, sound, FinishReason.FINISHED, 0, "cmpl-1"))
    other.close()
    drafter = HistoryDrafter(config, vocabulary=Vocabulary("small", 512))
    view = RequestView(
        "r2", np.asarray([8, 9, 7, 11], np.int32), 3, 100, DraftMode.TREE, 1 << 30, "aime-7", 0, "cmpl-2"
    )
    ask(drafter, [view])
    # its index is being built
    drafter.cache._executor.submit(lambda: None).result()
    (tree,) = ask(drafter, [view])
    assert tree.token_ids.tolist() == [13, 14]
    drafter.close()


def test_only_files_of_one_vocabulary_are_merged(tmp_path, make_answer):
    vocabularies = {"one": SMALL, "two": SMALL_LATER, "three": LARGE, "four": ANY_VOCABULARY}
    one, two, three, four = (
        filled(tmp_path / f"{name}.history", make_answer(name), vocabulary=its) for name, its in vocabularies.items()
    )
    into = tmp_path / "all.history"
    with pytest.raises(HistoryError, match="in the vocabulary of `large`"):
        upkeep.merge([one, two, three], into)
    assert not into.exists()
    assert upkeep.merge([one, two], into) == 2 and Database(into).vocabulary == SMALL
    into.unlink()
    # what is in it may be of any
    assert upkeep.merge([one, four], into) == 2 and Database(into).vocabulary == ANY_VOCABULARY
