"""Rows: what the target computed for an answer, on their way from the engine to whoever trains, through no file.

An engine sends them in parts, as its passes compute them, and never waits: without room a part is dropped. The other
end joins the parts of an answer by their positions, and gives it up where one is missing. Each is used once.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from vllm_specrollout.errors import ConfigError

HIGH_WATER = 4
"""Parts that each end queues; one is as large as a pass of the engine."""
MOST_OPEN = 256
"""Answers of which parts may be missing; beyond that the oldest is given up."""
_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, slots=True)
class Rows:
    """One answer with its prompt, whole: what a head learns from."""

    # [n] int32: of the prompt, then of the answer
    token_ids: torch.Tensor
    # how many of them are the prompt's
    prompt_tokens: int
    # of the weights that computed the rows
    version: int
    # [n, layers + 1, width] in the target's dtype, by token: what some of its layers took in, then what its output head
    # took in, which is normed; without an EAGLE-3 head in the engine there are no layers
    hidden: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Consecutive rows of one answer, as one pass of the engine computed them."""

    # of the request that computes them
    name: str
    # position of the first row, and how many the whole answer has
    begin: int
    total: int
    prompt_tokens: int
    version: int
    # [rows] int32
    token_ids: np.ndarray
    # [rows, layers + 1, width]
    hidden: torch.Tensor


class _Header(msgspec.Struct, frozen=True, array_like=True):
    number: int
    name: str
    begin: int
    total: int
    prompt_tokens: int
    version: int
    dtype: str
    shape: tuple[int, int, int]


class RowSink:
    """The engine's end.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PUSH, address)
        self._socket.immediate = True  # where nobody listens, nothing is queued
        self._socket.connect(address)
        self.address = address
        self.sent = self.dropped = 0
        """Parts, in all."""

    def send(self, part: RowsPart) -> bool:
        """False: there was no room."""
        hidden = part.hidden.contiguous().cpu()
        header = _Header(
            self.sent + self.dropped,
            part.name,
            part.begin,
            part.total,
            part.prompt_tokens,
            part.version,
            str(hidden.dtype).removeprefix("torch."),
            (hidden.shape[0], hidden.shape[1], hidden.shape[2]),
        )
        tokens = np.ascontiguousarray(part.token_ids, dtype="<i4")
        frames: list[Any] = [msgspec.msgpack.encode(header), tokens, hidden.view(torch.uint8).numpy()]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        self.sent += 1
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


class RowSource:
    """The end of whoever trains.

    Args:
        address: ipc://PATH; the socket is made, for this user alone.

    Raises:
        ConfigError: the address is none, or in use.
    """

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PULL, address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"rows cannot come to `{address}`: {error.strerror}", "name another path") from None
        self._path = Path(address.removeprefix("ipc://"))
        os.chmod(self._path, 0o600)
        self._open: OrderedDict[str, _OpenAnswer] = OrderedDict()
        self._next = 0
        self.lost = 0
        """Parts that the engine had no room for."""

    def __iter__(self) -> Iterator[Rows]:
        """All that come, for ever."""
        while True:
            yield from self.arrived(60.0)

    def arrived(self, timeout_s: float = 0.0) -> Iterator[Rows]:
        """What is whole by now; waits so long for the first part."""
        while self._socket.poll(math.ceil(timeout_s * 1e3)):
            if (rows := self._take(self._socket.recv_multipart())) is not None:
                yield rows
            timeout_s = 0.0

    def close(self) -> None:
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)

    def _take(self, frames: list[bytes]) -> Rows | None:
        header = msgspec.msgpack.decode(frames[0], type=_Header)
        self.lost += max(header.number - self._next, 0)
        self._next = header.number + 1
        if header.begin == 0:  # one that was preempted begins anew
            self._open[header.name] = _OpenAnswer(header)
            self._open.move_to_end(header.name)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        answer = self._open.get(header.name)
        if answer is None:
            return None
        if not answer.goes_on(header):
            del self._open[header.name]
            return None
        answer.add(header, frames[1], frames[2])
        return self._open.pop(header.name).rows if answer.have == header.total else None


class _OpenAnswer:
    """An answer of which rows are missing."""

    def __init__(self, header: _Header) -> None:
        self.have, self._first = 0, header
        shape = (header.total, *header.shape[1:])
        token_ids = torch.empty(header.total, dtype=torch.int32)
        hidden = torch.empty(shape, dtype=_DTYPES[header.dtype])
        self.rows = Rows(token_ids, header.prompt_tokens, header.version, hidden)

    def goes_on(self, header: _Header) -> bool:
        """Whether the part follows what is there, of the same weights."""
        own = (self._first.total, self._first.version, self._first.dtype, self._first.shape[1:])
        return (header.total, header.version, header.dtype, header.shape[1:]) == own and header.begin == self.have

    def add(self, header: _Header, tokens: bytes, hidden: bytes) -> None:
        end = self.have + header.shape[0]
        self.rows.token_ids.numpy()[self.have : end] = np.frombuffer(tokens, dtype="<i4")
        own = self.rows.hidden[self.have : end].view(torch.uint8).numpy()
        own[:] = np.frombuffer(hidden, dtype=np.uint8).reshape(own.shape)
        self.have = end


def _socket(kind: int, address: str) -> zmq.Socket[bytes]:
    if not address.startswith("ipc:///"):
        raise ConfigError(f"`{address[:140]}` is no address for rows", "write ipc:///PATH: they stay on the host")
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.linger = 0
    made.sndhwm = made.rcvhwm = HIGH_WATER
    return made
