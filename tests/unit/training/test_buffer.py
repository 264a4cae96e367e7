import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.unit.training.examples import SOURCE, example
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.training import buffer as buffer_module
from vllm_specrollout.training.buffer import Buffer, BufferWriter, Source, paths_in

ROOT = Path(__file__).parents[3]


def written(folder: Path, *examples, source: Source = SOURCE, most_tokens: int = 1 << 20) -> None:
    writer = BufferWriter(folder, source, most_tokens)
    for one in examples:
        writer.add(one)
    writer.close()


def test_what_was_added_is_read_back(tmp_path):
    added = [example(5, 2, number=1), example(9, 0, number=2, weights_version=3)]
    written(tmp_path, *added)
    buffer = Buffer(tmp_path)
    assert buffer.source == SOURCE and buffer.num_tokens() == 14 and buffer.length(1) == 9
    for one, other in zip(buffer, added, strict=True):
        assert one.num_prompt == other.num_prompt and one.weights_version == other.weights_version
        for name in ("token_ids", "hidden", "last_hidden"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_several_engines_write_into_one_folder(tmp_path):
    writers = [threading.Thread(target=written, args=(tmp_path, example(4, 1, number=n))) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(int(one.hidden[0, 0]) for one in Buffer(tmp_path)) == [0, 1000, 2000, 3000]


def test_beyond_the_bound_the_oldest_answers_go(tmp_path):
    for number in range(5):
        written(tmp_path, example(10, 2, number=number), most_tokens=30)
    assert [int(one.hidden[0, 0]) for one in Buffer(tmp_path)] == [2000, 3000, 4000]


def test_a_slow_disk_costs_answers_and_no_time(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(buffer_module, "save_file", lambda tensors, path, metadata: (go.wait(), path.touch()))
    monkeypatch.setattr(buffer_module, "FILE_TOKENS", 1)
    writer = BufferWriter(tmp_path, SOURCE, 1 << 20)
    for _ in range(7):
        writer.add(example(3, 1))
    assert writer.left_out == 7 - buffer_module.MOST_UNWRITTEN
    go.set()
    writer.close()
    assert len(paths_in(tmp_path)) == buffer_module.MOST_UNWRITTEN


def test_a_disk_that_fails_is_told_when_more_is_added(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError("no space left")

    monkeypatch.setattr(buffer_module, "save_file", fails)
    writer = BufferWriter(tmp_path, SOURCE, 1 << 20)
    writer.add(example(3, 1))
    with pytest.raises(OSError, match="no space left"):
        writer.close()


def test_a_damaged_file_is_left_out_and_named(tmp_path):
    written(tmp_path, example(5, 2))
    (cut,) = paths_in(tmp_path)
    whole = cut.read_bytes()
    written(tmp_path, example(6, 2, number=1))
    cut.write_bytes(whole[: len(whole) // 2])
    buffer = Buffer(tmp_path)
    assert buffer.damaged == [cut] and [len(one) for one in buffer] == [6]


def test_the_newest_weights_alone_can_be_asked_for(tmp_path):
    written(tmp_path, *(example(4, 1, number=n, weights_version=n // 2) for n in range(4)))
    assert [one.weights_version for one in Buffer(tmp_path, newest_only=True)] == [1, 1]


def test_an_empty_folder_and_mixed_targets_are_refused_with_the_way_out(tmp_path):
    with pytest.raises(UnsupportedError, match=r"holds no hidden states\n\nhint: roll out with --spec-rollout"):
        Buffer(tmp_path)
    written(tmp_path, example(4, 1))
    written(tmp_path, example(4, 1), source=Source("other", (2,), 4))
    with pytest.raises(UnsupportedError, match=r"of 2 kinds: target, layers \[1, 3\].*other, layers \[2\]"):
        Buffer(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match=r"file/below` cannot be written: Not a directory"):
        BufferWriter(tmp_path / "file" / "below", SOURCE, 10)


def test_hidden_states_are_their_owners_alone(tmp_path):
    written(tmp_path / "new", example(8, 3))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in paths_in(tmp_path / "new")] == [0o600]


def test_what_is_left_when_the_interpreter_ends_is_written_too(tmp_path):
    """Threads take no work by then; an engine in a script of its user's is closed that late."""
    program = f"""
import atexit
from pathlib import Path
from tests.unit.training.examples import SOURCE, example
from vllm_specrollout.training.buffer import BufferWriter

writer = BufferWriter(Path({str(tmp_path)!r}), SOURCE, 1 << 20)
writer.add(example(5, 2))
writer.flush()
writer.add(example(7, 2))
atexit.register(writer.close)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert Buffer(tmp_path).num_tokens() == 12
