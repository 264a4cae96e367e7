"""A directory of histories as nobody wants it."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from vllm_specrollout.history import frames
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.log import Writer
from vllm_specrollout.history.vocabulary import Vocabulary

OURS, THEIRS = Vocabulary("ours", 6000, "a1"), Vocabulary("theirs", 150_000, "b2")


def poison(folder: Path, good_answer: Answer) -> int:
    """Damaged and odd entries of every kind; returns how many there are beside the one good file, of `OURS`."""
    for number in range(5):
        numbered = f"answers-{number:04d}.history"
        os.mkfifo(folder / f"pipe-{number}.history")
        (folder / f"folder-{number}.history").mkdir()
        (folder / f"link-{number}.history").symlink_to("nowhere")
        (folder / f"text-{number}.history").write_text("ls -l\n")
        (folder / numbered).write_bytes(bytes(4096))
        header = frames.HEADER.pack(frames.MAGIC, 77, bytes(16), 0)[:-4]
        (folder / f"later-{number}.history").write_bytes(header + struct.pack("<I", zlib.crc32(header)))
        Writer(folder / f"foreign-{number}.history", vocabulary=THEIRS).close()
        torn = folder / f"torn-{number}.history"
        Writer(torn, vocabulary=OURS).close()
        data = bytearray(torn.read_bytes())
        data[9] ^= 0xFF
        torn.write_bytes(data)
    os.mkfifo(folder / "answers-0005.history")
    (folder / "answers-0006.history").mkdir()
    Writer(folder / "answers-0007.history", vocabulary=THEIRS).close()
    good = Writer(folder / "good.history", vocabulary=OURS)
    good.append(good_answer)
    good.close()
    return len(list(folder.iterdir())) - 1
