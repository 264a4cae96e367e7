"""Named shared memory: who may have it, and what becomes of it when its owner ends."""

import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_specrollout.cluster import segment
from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.errors import ConfigError

SIZE = 4 * segment.PAGE


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def path_of(name: str) -> Path:
    return segment.FOLDER / f"{segment.PREFIX}{name}"


def test_a_guest_sees_what_the_owner_writes(name: str) -> None:
    owner = segment.create(name, SIZE)
    guest = segment.attach(name)
    owner.map[segment.PAGE : segment.PAGE + 3] = b"abc"
    assert len(guest.map) == SIZE and guest.map[segment.PAGE : segment.PAGE + 4] == b"abc\0"
    guest.close()
    owner.close()


def test_only_the_user_may_open_it_and_its_room_is_reserved(name: str) -> None:
    owner = segment.create(name, SIZE)
    status = path_of(name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= SIZE
    owner.close()


def test_its_name_goes_with_its_owner_and_nothing_is_left(name: str) -> None:
    owner = segment.create(name, SIZE)
    guest = segment.attach(name)
    owner.close()
    assert not path_of(name).exists()
    assert guest.map[:8] == segment.MAGIC  # whoever has it keeps it
    guest.close()
    assert not list(segment.FOLDER.glob(f".{segment.PREFIX}{name}*"))


@pytest.mark.parametrize("bad", ["", ".", "../x", "a/b", "-a", ".a", "a b", "a\0", "x" * 129, "ä"])
def test_a_name_that_could_lead_elsewhere_is_refused(bad: str) -> None:
    for opened in (lambda: segment.create(bad, SIZE), lambda: segment.attach(bad)):
        with pytest.raises(ConfigError, match="is no name for shared memory"):
            opened()


@pytest.mark.parametrize("size", [-1, 0, 1, SIZE + 1, segment.MAX_SIZE + segment.PAGE])
def test_a_size_out_of_range_is_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"shared memory of {size} bytes"):
        segment.create(name, size)


def test_more_than_the_host_has_is_refused_and_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MailboxError, match="No space left"):
        segment.create(name, SIZE)
    assert not path_of(name).exists()


HEADERS = {
    "none of ours": segment.HEADER.pack(b"SRHIST\r\n", 1, 0, SIZE),
    "has layout version 2; this end knows 1": segment.HEADER.pack(segment.MAGIC, 2, 0, SIZE),
    f"says that it has {2 * SIZE} bytes; it has {SIZE}": segment.HEADER.pack(segment.MAGIC, 1, 0, 2 * SIZE),
    f"says that it has 0 bytes; it has {SIZE}": segment.HEADER.pack(segment.MAGIC, 1, 0, 0),
}


@pytest.mark.parametrize("words", HEADERS)
def test_a_header_that_is_wrong_is_refused(name: str, words: str) -> None:
    owner = segment.create(name, SIZE)
    owner.map[: segment.HEADER.size] = HEADERS[words]
    with pytest.raises(MailboxError, match=words):
        segment.attach(name)
    owner.close()


def test_a_file_shorter_than_a_header_is_refused(name: str) -> None:
    path_of(name).touch(0o600)
    with pytest.raises(MailboxError, match="none of ours"):
        segment.attach(name)
    segment.create(name, SIZE).close()  # nobody owns it, so its name is free


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_memory_that_others_may_open_is_refused(name: str, mode: int) -> None:
    owner = segment.create(name, SIZE)
    path_of(name).chmod(mode)
    with pytest.raises(MailboxError, match=f"open to others .mode {mode:o}"):
        segment.attach(name)
    owner.close()


def test_a_link_is_not_followed(name: str, tmp_path: Path) -> None:
    path_of(name).symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(MailboxError, match="cannot be opened"):
            segment.attach(name)
        with pytest.raises(MailboxError, match="is in the way"):
            segment.create(name, SIZE)
    finally:
        path_of(name).unlink()


def test_an_owner_s_name_is_not_taken_from_it(name: str) -> None:
    owner = segment.create(name, SIZE)
    with pytest.raises(MailboxError, match="is served by another mailbox"):
        segment.create(name, SIZE)
    segment.attach(name).close()
    owner.close()


def test_a_second_guest_is_refused_until_the_first_is_gone(name: str) -> None:
    owner = segment.create(name, SIZE)
    guest = segment.attach(name)
    with pytest.raises(MailboxError, match="has a guest already"):
        segment.attach(name)
    guest.close()
    segment.attach(name).close()
    owner.close()


def test_closing_late_leaves_a_successor_alone(name: str) -> None:
    former = segment.create(name, SIZE)
    path_of(name).unlink()
    latter = segment.create(name, SIZE)
    former.close()
    segment.attach(name).close()
    latter.close()
    assert not path_of(name).exists()


OPENED = """
import os, sys, time
from vllm_specrollout.cluster import segment
kept = segment.create(sys.argv[1], 8192) if sys.argv[2] == "owner" else segment.attach(sys.argv[1])
if sys.argv[3] == "fork" and os.fork() == 0:
    sys.exit()  # as a child does that runs its exit handlers
if sys.argv[3] == "fork":
    os.wait()
    print(os.path.exists("/dev/shm/specrollout-" + sys.argv[1]))
print("opened", flush=True)
if sys.argv[3] == "stay":
    time.sleep(600)
"""


def opened(name: str, role: str, then: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", OPENED, name, role, then], **pipes)


def test_an_owner_that_ends_without_closing_leaves_nothing_and_no_warning(name: str) -> None:
    done = opened(name, "owner", "end")
    assert done.communicate() == ("opened\n", "")
    assert not path_of(name).exists()


def test_a_guest_that_ends_without_closing_leaves_the_memory_and_no_warning(name: str) -> None:
    owner = segment.create(name, SIZE)
    assert opened(name, "guest", "end").communicate() == ("opened\n", "")
    segment.attach(name).close()
    owner.close()


def test_a_fork_s_end_is_not_its_owner_s(name: str) -> None:
    assert opened(name, "owner", "fork").communicate() == ("True\nopened\n", "")
    assert not path_of(name).exists()


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_a_killed_process_gives_its_place_up(name: str, role: str) -> None:
    owner = segment.create(name, SIZE) if role == "guest" else None
    with opened(name, role, "stay") as process:
        assert process.stdout.readline() == "opened\n"
        with pytest.raises(MailboxError):
            segment.create(name, SIZE) if role == "owner" else segment.attach(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
    owner = owner or segment.create(name, SIZE)
    segment.attach(name).close()
    owner.close()


@pytest.fixture
def swept(name: str) -> Iterator[str]:
    """A killed owner's name, and what it must not be taken for."""
    with opened(f"{name}-killed", "owner", "stay") as process:
        assert process.stdout is not None and process.stdout.readline() == "opened\n"
        process.kill()
    yield f"{name}-killed"
    for path in segment.FOLDER.glob(f"*{name}*"):
        path.unlink()


def test_what_killed_owners_left_is_swept_and_what_lives_stays(name: str, swept: str) -> None:
    owner = segment.create(f"{name}-lives", SIZE)
    with opened(f"{name}-other", "owner", "stay") as process:
        assert process.stdout is not None and process.stdout.readline() == "opened\n"
        assert segment.sweep(name) == 1
        process.terminate()
    assert not path_of(swept).exists()
    assert path_of(f"{name}-lives").exists() and path_of(f"{name}-other").exists()
    assert segment.sweep(name) == 1 and segment.sweep(name) == 0, "once that one is killed, too"
    segment.attach(f"{name}-lives").close()
    owner.close()


def test_half_a_segment_whose_owner_was_killed_is_swept_and_one_in_the_making_is_not(name: str) -> None:
    left = segment.FOLDER / f".{segment.PREFIX}{name}.left"
    left.write_bytes(segment.HEADER.pack(segment.MAGIC, 1, 0, SIZE))
    new = segment.FOLDER / f".{segment.PREFIX}{name}.new"
    new.touch()  # not locked yet
    assert segment.sweep(name) == 1
    assert not left.exists() and new.exists()
    new.unlink()


def test_what_is_not_ours_is_never_swept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").write_bytes(segment.HEADER.pack(segment.MAGIC, 1, 0, SIZE))
    path_of(f"{name}-link").symlink_to(tmp_path / "elsewhere")
    path_of(f"{name}-other").write_bytes(b"something else")
    path_of(f"{name}-folder").mkdir()
    os.mkfifo(path_of(f"{name}-fifo"))
    path_of(f"{name}-user").write_bytes(segment.HEADER.pack(segment.MAGIC, 1, 0, SIZE))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert segment.sweep(name) == 0
    path_of(f"{name}-user").unlink()
    assert segment.sweep(name) == 0 and segment.sweep("nothing-of-this-name") == 0
    assert len(list(segment.FOLDER.glob(f"*{name}*"))) == 4
    path_of(f"{name}-folder").rmdir()
    for path in segment.FOLDER.glob(f"*{name}*"):
        path.unlink()


def test_the_header_s_layout_is_the_one_that_is_documented(name: str) -> None:
    owner = segment.create(name, SIZE)
    assert owner.map[:24] == segment.MAGIC + struct.pack("=IIQ", segment.VERSION, 0, SIZE)
    owner.close()
