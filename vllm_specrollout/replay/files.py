"""Trace files: lines of JSON, packed as the name says (`.zst`, `.gz`), written beside the engine's step.

May enter: files, compression, the thread that writes. May not: what a record means.
"""

from __future__ import annotations

import gzip
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from vllm_specrollout.config.places import new_file
from vllm_specrollout.errors import logger
from vllm_specrollout.observe.patience import PATIENCE_S, wait_for
from vllm_specrollout.replay import records
from vllm_specrollout.replay.records import VERSION, Arrival, End, Header, Record, Step, Trace, TraceError

MOST_BYTES = 1 << 32
"""Of a trace, unpacked; an hour of a busy engine has some 100 MB."""
MOST_LINE = 1 << 26
"""Bytes of one line: a step of 4,096 requests with trees of 64 nodes has 4 MB."""
# of a file; of a packed one zlib makes up to a thousand times as much, and zstandard 128 KiB of every 4 bytes
_CHUNK, _PACKED_CHUNK = 1 << 16, 1 << 10
_IDLE_S = 0.5
_LEVEL = 9
MOST_WAITING = 1 << 28
"""Bytes, about, of records that wait for the disk: some 20 seconds of a busy engine."""
_NOT_A_TRACE = 'give a file that `--spec-rollout \'{"record": "FILE.jsonl.zst"}\'` has written'


class Sink(Protocol):
    """Where records go. `write` must not wait."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TraceWriter:
    """Writes records one after another; what was written stays readable if the process dies after `flush`."""

    def __init__(self, path: Path) -> None:
        """Raises:
        TraceError: the file cannot be made, or its packing is not installed.
        """
        pack = _zstandard(path) if path.suffix == ".zst" else None
        try:
            self._file: IO[bytes] = new_file(path)
        except OSError as error:
            way = "name a file in an existing folder that may be written"
            raise TraceError(f"the trace `{path}` cannot be written: {error.strerror}", way) from None
        self._packed: Any = self._file
        if pack is not None:
            self._packed = pack.ZstdCompressor(level=_LEVEL).stream_writer(self._file)
        elif path.suffix == ".gz":
            self._packed = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=6, mtime=0, filename="")

    def write(self, record: Record) -> None:
        self._packed.write(records.encode(record) + b"\n")

    def flush(self) -> None:
        """Everything so far can be read back, whatever happens next."""
        self._packed.flush()
        self._file.flush()

    def close(self) -> None:
        if self._packed is not self._file:
            self._packed.close()
        self._file.close()


class ThreadSink:
    """Packs and writes in a thread of its own. A full disk or any other error ends the recording, never the engine.

    So does a disk that stands still: once there is no room for a record, no later one is taken. A trace has no holes.
    `close` leaves the disk to itself after `patience_s` without any progress.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        self._path = path
        self._patience_s = patience_s
        # bytes: the one is changed by `write` alone, the other by the thread alone
        self._put = self._taken = 0
        self.dropped = 0
        """Records that there was no room for."""
        self._writer = TraceWriter(path)
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specrollout-record", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        size = _bytes_of(record)
        waiting = self._put - self._taken
        if self.dropped or (waiting and waiting + size > MOST_WAITING):
            if not self.dropped:
                what = "The disk of the trace %s stands still; the recording ends, and the engine goes on without it"
                logger.error(what, self._path)
            self.dropped += 1
            return
        self._put += size
        self._queue.put(record)

    def close(self) -> None:
        """Wait until all is written, as long as the disk takes any of it."""
        self._queue.put(None)
        has_ended = wait_for(self._thread, lambda: self._taken, self._patience_s)
        if not has_ended or self.dropped:
            what = "The trace %s is not whole: %d records of its end are missing"
            logger.error(what, self._path, self.dropped + self._queue.qsize())

    def _run(self) -> None:
        try:
            is_flushed = True
            while True:
                try:
                    record = self._queue.get(timeout=None if is_flushed else _IDLE_S)
                except queue.Empty:
                    self._writer.flush()
                    is_flushed = True
                    continue
                if record is None:
                    break
                self._taken += _bytes_of(record)
                self._writer.write(record)
                is_flushed = False
            self._writer.close()
        except Exception:
            # whatever it was: nobody else would take what the engine goes on putting into the queue
            logger.exception("The trace %s cannot be written any further; the engine goes on without it", self._path)
            while (record := self._queue.get()) is not None:
                self._taken += _bytes_of(record)


def _bytes_of(record: Record) -> int:
    """Of a record in memory, about: a list has 8 bytes for each number, and most tokens 28 of their own."""
    if isinstance(record, End):
        return 512 + 36 * len(record.token_ids)
    if isinstance(record, Step):
        trees = sum(512 + 80 * len(candidates.token_ids) for candidates in record.candidates)
        return 512 + trees + 128 * len(record.verified)
    return 512


def write_trace(path: Path, trace: Trace) -> None:
    """Write a whole trace. Arrivals stand before the steps that first speak of them, ends behind all.

    Raises:
        TraceError: the file cannot be made.
    """
    writer = TraceWriter(path)
    try:
        writer.write(trace.header)
        arrivals = sorted(trace.arrivals, key=lambda arrival: -arrival.request)
        for i, step in enumerate(trace.steps):
            while arrivals and arrivals[-1].step <= i:
                writer.write(arrivals.pop())
            writer.write(step)
        for arrival in reversed(arrivals):
            writer.write(arrival)
        for end in trace.ends.values():
            writer.write(end)
    finally:
        writer.close()


def recorded_by(path: Path, engine: int) -> Path:
    """Where an engine of a data-parallel group records, if `record` names that path."""
    return path.with_name(f"dp{engine}-{path.name}")


def read_trace(path: Path) -> Trace:
    """Read a trace; one that stops in the middle is read as far as it goes, and `is_cut` says so.

    Raises:
        TraceError: no such file, not a trace, of another version, or damaged.
    """
    lines = PackedLines(path)
    numbered = enumerate(lines, start=1)
    header = _read_header(path, next(numbered, (1, bytearray()))[1])
    arrivals: list[Arrival] = []
    steps: list[Step] = []
    ends: dict[int, End] = {}
    for number, line in numbered:
        try:
            record = records.decode(line)
            if isinstance(record, Step):
                steps.append(record)
            elif isinstance(record, End):
                ends[record.request] = record
            elif record.request != len(arrivals):
                raise ValueError("requests are not counted in order")
            else:
                arrivals.append(record)
        except (ValueError, RecursionError) as error:
            cause = f"line {number} of `{path}` is damaged: {error!s:.200}"
            raise TraceError(cause, "record the trace again; what stands behind the line cannot be trusted") from None
    return Trace(header, tuple(arrivals), tuple(steps), ends, lines.is_cut)


def _read_header(path: Path, line: bytearray) -> Header:
    try:
        header = records.decode_header(line)
    except (ValueError, RecursionError) as error:
        cause = f"`{path}` is not a trace: its first line is no header ({error!s:.200})"
        raise TraceError(cause, _NOT_A_TRACE) from None
    if isinstance(header, int):
        cause = f"`{path}` is a trace of version {header}, and this release reads version {VERSION}"
        raise TraceError(cause, "record it again, or replay it with the release that recorded it")
    return header


class PackedLines:
    """The lines of a packed file; a last line without an end is left out, and `is_cut` tells.

    Args:
        way: out of a file that cannot be unpacked.
    """

    def __init__(self, path: Path, way: str = _NOT_A_TRACE) -> None:
        self._path, self._way = path, way
        self.is_cut = False
        self.rest = bytearray()
        """A last line that has no end, once all others are read."""

    def __iter__(self) -> Iterator[bytearray]:
        rest, num_bytes = self.rest, 0
        for chunk in self._chunks():
            num_bytes += len(chunk)
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                yield from lines
            if len(rest) > MOST_LINE or num_bytes > MOST_BYTES:
                cause = f"`{self._path}` holds more than {MOST_BYTES} bytes, or a line of more than {MOST_LINE}"
                raise TraceError(cause, "record a shorter run")
        self.rest, self.is_cut = rest, self.is_cut or bool(rest)

    def _chunks(self) -> Iterator[bytes]:
        """The file's content, unpacked piece by piece: a few bytes may expand to very many."""
        unpack: Any = None
        errors: tuple[type[Exception], ...] = (zlib.error,)
        if self._path.suffix == ".zst":
            zstandard = _zstandard(self._path)
            unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            errors = (zstandard.ZstdError,)
        elif self._path.suffix == ".gz":
            unpack = zlib.decompressobj(wbits=31)
        try:
            with open(self._path, "rb") as handle:
                while chunk := handle.read(_CHUNK if unpack is None else _PACKED_CHUNK):
                    if unpack is not None and unpack.eof:
                        break
                    yield chunk if unpack is None else unpack.decompress(chunk)
        except OSError as error:
            raise TraceError(f"`{self._path}` cannot be read: {error.strerror}", "name an existing file") from None
        except errors as error:
            raise TraceError(f"`{self._path}` cannot be unpacked: {error!s:.200}", self._way) from None
        self.is_cut = unpack is not None and not unpack.eof


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        cause = f"`{path}` ends in .zst, and `zstandard` is not installed"
        raise TraceError(cause, "run `pip install zstandard`, or name a file that ends in .jsonl.gz") from None
    return zstandard
