"""Files whose checksums are right and whose content nobody wrote: small ones that expand, and ones changed anywhere."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.history.stored import answers_in
from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import frames, records, tokens, upkeep
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.epochs import EpochError
from vllm_specrollout.history.frames import HistoryError
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.log import Reader
from vllm_specrollout.history.records import EpochRecord, RewardRecord, encode_record
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import Vocabulary

MakeAnswer = Callable[..., Answer]
IDENTITY = b"x" * 16
SEED = zlib.crc32(IDENTITY)


def write(path: Path, payloads: list[tuple[int, bytes]]) -> None:
    """A file of these records, by sequence number, all checksums right."""
    found = [frames.new_frame(SEED, sequence, payload) for sequence, payload in payloads]
    path.write_bytes(frames.new_header(IDENTITY) + b"".join(found))


def bomb(tail: bytes | None = None) -> bytes:
    """An answer of 4 Mi tokens, 16 MiB, in some 16 KB."""
    whole = bytes([0x80 | 32]) + b"\x80\x80\x80\x02" + zlib.compress(bytes(4 * tokens.MAX_TOKENS), 9)
    tail = tokens.encode_tokens(np.arange(3, dtype=np.int32)) if tail is None else whole
    return records._ANSWER.pack(1, 0, False, 0.0, 0, 0, 1, 1, len(tail)) + b"p" + b"r" + tail + whole


def test_small_records_of_long_answers_are_expanded_one_at_a_time_and_not_before_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "bomb.history"
    write(path, [(number, bomb()) for number in range(10)])
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    try:
        store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20 and store.stats().answers == 10
        tracemalloc.reset_peak()
        found = [store.read(located, "p") for located in store.find("p")[:1]]
        one = tracemalloc.get_traced_memory()[1]
        assert found[0] is not None and found[0].num_tokens == tokens.MAX_TOKENS
        del found
        tracemalloc.reset_peak()
        for located in store.find("p"):
            assert store.read(located, "p") is not None
        assert tracemalloc.get_traced_memory()[1] < one + (32 << 20)
        # an index that there is no room for costs nothing
        config = HistoryConfig(max_mib=64)
        tracemalloc.reset_peak()
        builder = Background("build")
        cache = IndexCache(config, store, lambda: HistoryIndex(min_match=1, max_match=7, max_matches=32), builder)
        cache.want("p")
        builder.submit(lambda: None).result(60)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20 and cache.stats().num_bytes <= 64 << 20
        assert cache.stats().shortened == 1
        cache.close()
        store.close()
    finally:
        tracemalloc.stop()


def test_a_prompt_longer_than_any_that_is_kept_is_no_record(tmp_path: Path, make_answer: MakeAnswer) -> None:
    path = tmp_path / "tail.history"
    write(path, [(0, bomb(b"whole")), (1, encode_record(make_answer("a")))])
    reader = Reader(path)
    assert [head.request_id for _, head in reader.records()] == ["a"] and reader.undecodable == 1


@st.composite
def changed(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few changes: bits, pieces that are gone, doubled, random, zero, or numbers at their limits."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        end = min(len(found), at + draw(st.sampled_from([1, 2, 4, 8, 64])))
        how = draw(st.sampled_from(["flip", "drop", "double", "insert", "zero", "limit"]))
        if how == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "drop":
            del found[at:end]
        elif how == "double":
            found[at:at] = found[at:end]
        elif how == "insert":
            found[at:at] = draw(st.binary(max_size=8))
        elif how == "zero":
            found[at:end] = bytes(end - at)
        else:
            number = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
            found[at : at + 8] = struct.pack(draw(st.sampled_from(["<I", "<q", "<Q"])), number)
    return bytes(found)


@st.composite
def content(draw: st.DrawFn, good: list[bytes]) -> list[tuple[int, bytes]]:
    """Records by sequence number, most of them damaged before their checksums were made."""
    found, sequence = list[tuple[int, bytes]](), 0
    for _ in range(draw(st.integers(1, 12))):
        payload = draw(st.sampled_from(good))
        if draw(st.booleans()):
            payload = draw(changed(payload))
        sequence = draw(st.one_of(st.just(sequence + 1), st.sampled_from([0, sequence, 1 << 15, 1 << 31])))
        found.append((sequence, payload))
    return found


@pytest.fixture(scope="session")
def good() -> list[bytes]:
    """Records as they ought to be."""
    rng = np.random.default_rng(0)
    found: list[bytes] = []
    for number, (count, width) in enumerate([(0, 2), (1, 300), (5, 70_000), (63, 2**31 - 1), (300, 2), (900, 70_000)]):
        ids = rng.integers(0, width, count).astype(np.int32)
        status = records._STATUSES[number % 3]
        answer = Answer(f"p{number % 3}", f"r{number}", number // 3, number, status, ids, ids[:9], None)
        found.append(encode_record(answer))
    others = (RewardRecord(3, "r3", 1.5), EpochRecord(7), Vocabulary("ours", 6000, "a1"))
    return [*found, *map(encode_record, others)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_right_checksums_hold_is_read_or_left_out_and_upkeep_goes_on(
    tmp_path_factory: pytest.TempPathFactory, make_answer: MakeAnswer, good: list[bytes], data: st.DataObject
) -> None:
    where = tmp_path_factory.mktemp("wrong")
    path = where / data.draw(st.sampled_from(["answers-0000.history", "other.history"]))
    write(path, data.draw(content(good)))
    report = upkeep.inspect(path)
    assert report.answers <= report.records
    store = HistoryStore(HistoryConfig(dir=str(where), epochs=1024))
    for number in range(3):
        for answer in answers_in(store, f"p{number}"):
            assert answer.problem_id == f"p{number}" and answer.token_ids.dtype == np.int32
    assert all(store.read(located) is None or located.place.epoch <= store.epoch for located in store.find(None))
    store.report_reward("r3", 1.0)
    # an epoch near the last one leaves no room for more
    with contextlib.suppress(EpochError):
        store.begin_epoch()
    own = make_answer("own", "mine", epoch=store.epoch)
    store.append(own)
    with contextlib.suppress(EpochError):
        store.begin_epoch()
    assert [answer.request_id for answer in answers_in(store, "mine")] == ["own"]
    assert store.stats().write_errors == 0
    store.close()
    assert "own" in [answer.request_id for answer in answers_in(HistoryStore(HistoryConfig(dir=str(where))), "mine")]
    with contextlib.suppress(HistoryError):
        upkeep.merge([path], where / "merged" / "all.history")
        upkeep.trim([path], 1)
