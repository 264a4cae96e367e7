"""What is promised of a history file: every record comes back, one writes it, damage costs what it touches."""

import dataclasses
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout.history import frames
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.claiming import claim
from vllm_specrollout.history.frames import HistoryError
from vllm_specrollout.history.locking import LockedError
from vllm_specrollout.history.log import Reader, Writer
from vllm_specrollout.history.records import (
    AnswerHead,
    EpochRecord,
    RewardRecord,
    decode_head,
    decode_record,
    encode_record,
    with_reward,
)
from vllm_specrollout.types import FinishReason

TEXTS = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 150_000), max_size=50).map(lambda values: np.array(values, np.int32))
ANSWERS = st.builds(
    Answer,
    problem_id=TEXTS,
    request_id=TEXTS,
    epoch=st.integers(0, 1 << 40),
    weights_version=st.integers(-1, 1 << 40),
    status=st.sampled_from(FinishReason),
    token_ids=TOKENS,
    prompt_tail=TOKENS,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
OTHERS = st.builds(EpochRecord, st.integers(0, 1 << 40)) | st.builds(
    RewardRecord, st.integers(0, 1 << 31), TEXTS, st.floats(allow_nan=False)
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers-0000.history"


def read_all(path):
    """Every record of a file, whole."""
    reader = Reader(path)
    return [decode_record(frame.payload) for frame, _ in reader.records()]


def ids(path):
    return [record.request_id for record in read_all(path)]


@given(ANSWERS)
def test_an_answer_comes_back_as_it_was(answer):
    back = decode_record(encode_record(answer))
    for name in Answer.__slots__:
        assert np.array_equal(getattr(back, name), getattr(answer, name)), name


@given(ANSWERS, st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_reward_can_be_put_into_an_answers_bytes(answer, reward):
    changed = with_reward(encode_record(answer), reward)
    assert changed == encode_record(dataclasses.replace(answer, reward=reward))


@given(OTHERS)
def test_rewards_and_epochs_come_back_as_they_were(record):
    assert decode_record(encode_record(record)) == record


@given(ANSWERS)
def test_a_head_says_all_but_the_tokens(answer):
    head = decode_head(encode_record(answer))
    assert isinstance(head, AnswerHead)
    for name in ("problem_id", "request_id", "epoch", "weights_version", "status", "reward"):
        assert getattr(head, name) == getattr(answer, name)
    assert head.num_tokens == answer.token_ids.size


@given(st.binary(max_size=80))
def test_a_payload_that_is_no_record_is_a_value_error(payload):
    try:
        record = decode_record(payload)
    except ValueError:
        return
    # bytes that happen to be a record are that record
    assert decode_record(encode_record(record)) is not None


def test_half_a_surrogate_pair_in_an_id_is_kept(path, make_answer):
    writer = Writer(path)
    writer.append(make_answer("\ud800", problem_id="\udfff"))
    assert read_all(path)[0].problem_id == "\udfff"


def test_records_are_read_by_others_while_the_file_is_written(path, make_answer, same):
    writer = Writer(path)
    reader = Reader(path)
    places = []
    for number in range(3):
        answer = make_answer(str(number))
        places.append(writer.append(answer).offset)
        (frame, head), *more = reader.records()
        assert not more and head.request_id == str(number) and frame.offset == places[-1]
        assert same(reader.read(places[-1]), answer)
    assert list(reader.records()) == []


def test_a_file_has_one_writer_even_if_its_own_process_reads_it(path, make_answer):
    writer = Writer(path)
    writer.append(make_answer("a"))
    read_all(path)
    with pytest.raises(LockedError, match="being written"):
        Writer(path)
    writer.close()
    Writer(path)


def test_each_writer_claims_a_file_of_its_own_and_later_ones_take_them_over(tmp_path, make_answer):
    one, two = claim(tmp_path), claim(tmp_path)
    assert one.path != two.path
    one.append(make_answer("a"))
    one.close()
    found = []
    again = claim(tmp_path, lambda frame, head: found.append(head.request_id))
    assert again.path == one.path and found == ["a"]


@pytest.mark.parametrize("left", ["nothing", "one byte", "all but one byte"])
def test_a_torn_header_means_a_file_that_holds_nothing(path, make_answer, left):
    Writer(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: {"nothing": 0, "one byte": 1, "all but one byte": len(whole) - 1}[left]])
    assert read_all(path) == []
    Writer(path).append(make_answer("a"))
    assert ids(path) == ["a"]


def test_a_torn_record_is_cut_wherever_it_was_torn(path, make_answer):
    writer = Writer(path)
    writer.append(make_answer("a"))
    last = writer.append(make_answer("b"))
    writer.close()
    whole = path.read_bytes()
    for size in range(last.offset, len(whole)):
        path.write_bytes(whole[:size])
        assert ids(path) == ["a"]
        again = Writer(path)
        assert path.stat().st_size == last.offset
        again.append(make_answer("c"))
        again.close()
        assert ids(path) == ["a", "c"]


def test_a_reader_comes_back_to_a_record_that_was_half_written(path, make_answer):
    writer = Writer(path)
    writer.append(make_answer("a"))
    last = writer.append(make_answer("b"))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: last.offset + 30])
    reader = Reader(path)
    assert [head.request_id for _, head in reader.records()] == ["a"]
    with path.open("r+b") as file:
        file.write(whole)
    assert [head.request_id for _, head in reader.records()] == ["b"]
    assert reader.scanner().damaged == 0


def test_a_damaged_record_is_stepped_over_and_counted(path, make_answer):
    writer = Writer(path)
    places = [writer.append(make_answer(name)) for name in "abc"]
    writer.close()
    data = bytearray(path.read_bytes())
    data[places[1].offset + 40] ^= 1
    path.write_bytes(data)
    reader = Reader(path)
    assert [head.request_id for _, head in reader.records()] == ["a", "c"]
    assert (reader.scanner().damaged, reader.scanner().missing) == (1, 1)
    assert reader.read(places[1].offset) is None
    again = Writer(path)
    again.append(make_answer("d"))
    assert ids(path) == ["a", "c", "d"]


def test_a_record_that_is_there_twice_is_read_once(path, make_answer):
    writer = Writer(path)
    places = [writer.append(make_answer(name)) for name in "ab"]
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data + data[places[0].offset :])
    reader = Reader(path)
    assert [head.request_id for _, head in reader.records()] == ["a", "b"]
    assert reader.scanner().repeated == 2


def test_a_record_of_another_file_is_no_record(tmp_path, make_answer):
    one, two = (Writer(tmp_path / f"{name}.history") for name in "ab")
    frame = one.append(make_answer("a"))
    two.append(make_answer("b"))
    stray = one.path.read_bytes()[frame.offset :]
    with two.path.open("ab") as file:
        file.write(stray)
    assert ids(two.path) == ["b"]


def test_a_length_of_gigabytes_is_damage_and_is_not_read(path, make_answer):
    writer = Writer(path)
    first = writer.append(make_answer("a"))
    writer.append(make_answer("b"))
    writer.close()
    data = bytearray(path.read_bytes())
    seed = writer.reader.scanner().seed
    start = frames.FRAME.pack(frames.MARKER, 0xFFFF_FFF0, 0, 0, 0)[:12]
    data[first.offset : first.offset + 16] = start + struct.pack("<I", zlib.crc32(start, seed))
    path.write_bytes(data)
    assert ids(path) == ["b"]


@settings(max_examples=30)
@given(chunk=st.integers(4, 40), data=st.data())
def test_a_window_finds_what_a_search_of_all_the_bytes_finds(tmp_path_factory, chunk, data):
    text = data.draw(st.lists(st.sampled_from([b"a", b"b", b"ab"]), max_size=60).map(b"".join))
    path = tmp_path_factory.mktemp("window") / "text"
    path.write_bytes(text)
    window = frames.Window((held := frames.Descriptor(path, os.O_RDONLY)).fd, len(text), chunk)
    for offset in range(len(text) + 1):
        assert window.find(b"abab", offset) == text.find(b"abab", offset)
        assert window.take(offset, 7) == text[offset : offset + 7]
    assert held.fd >= 0


def test_a_rewritten_file_holds_what_was_asked_for_and_old_readers_go_on(path, make_answer, same):
    writer = Writer(path)
    kept, dropped = make_answer("kept"), make_answer("dropped")
    places = [writer.append(dropped), writer.append(kept)]
    old = Reader(path)
    list(old.records())
    frame = writer.rewrite([kept])
    assert ids(path) == ["kept"]
    assert same(writer.reader.read(frame.offset), kept)
    assert same(old.read(places[0].offset), dropped) and not old.is_current
    with pytest.raises(LockedError):
        Writer(path)
    writer.append(make_answer("later"))
    assert ids(path) == ["kept", "later"]


def test_a_rewriting_that_fails_leaves_the_file_and_its_writer_as_they_were(path, make_answer):
    writer = Writer(path)
    writer.append(make_answer("a"))

    def fail():
        yield make_answer("b")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        writer.rewrite(fail())
    writer.append(make_answer("c"))
    assert ids(path) == ["a", "c"] and list(path.parent.iterdir()) == [path]


def test_a_copy_that_a_killed_rewriting_left_is_removed(path, make_answer):
    Writer(path).close()
    left = path.with_name(path.name + ".new")
    left.write_bytes(b"half")
    Writer(path)
    assert not left.exists()


def test_a_failed_write_leaves_the_file_as_it_was(path, make_answer, monkeypatch):
    writer = Writer(path)
    writer.append(make_answer("a"))
    size = path.stat().st_size
    write = os.pwrite

    def half_then_full(fd, data, offset):
        if len(data) < 30:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(OSError, match="No space"):
        writer.append(make_answer("b"))
    assert path.stat().st_size == size
    monkeypatch.undo()
    writer.append(make_answer("c"))
    assert ids(path) == ["a", "c"]


def header_of(version: int) -> bytes:
    start = frames.HEADER.pack(frames.MAGIC, version, bytes(16), 0)[:-4]
    return start + struct.pack("<I", zlib.crc32(start))


@pytest.mark.parametrize(
    "header, cause",
    [
        (b"something else altogether, of some length", "does not start like a history file"),
        (b"x", "does not start like a history file"),
        (header_of(1)[:-1] + b"\0", "is damaged"),
        (header_of(7), "has format version 7, and this vllm-specrollout reads versions 1 to 2"),
    ],
    ids=["another format", "one strange byte", "a damaged header", "a later version"],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(path, header, cause):
    path.write_bytes(header)
    for use in (read_all, Writer):
        with pytest.raises(HistoryError, match=cause) as caught:
            use(path)
        assert str(path) in caught.value.cause and "version" in caught.value.cause
        assert "move" in caught.value.hint
    assert path.read_bytes() == header, "what cannot be read must not be touched"


def test_a_history_file_is_written_and_read_without_torch_or_vllm():
    code = "import sys, vllm_specrollout.history.log as log; print([n for n in ('torch', 'vllm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
