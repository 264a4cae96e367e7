"""Rows: what the target computed for an answer, on their way from the engine to whoever trains, through no file.

An engine sends a message a step, and never waits: without room, a step's rows are dropped. A step may compute a part of
an answer. The other end joins parts by their positions, and gives an answer up where one is missing.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import IntArray

HIGH_WATER = 8
"""Steps of the engine that each end queues."""
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


class RowsPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one answer, which one step of the engine computed."""

    name: str  # of the request that computes them
    begin: int  # position of the first row
    count: int
    total: int  # rows of the whole answer
    prompt_tokens: int
    version: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    number: int
    dtype: str
    width: tuple[int, int]  # layers + 1, and values of each
    parts: list[RowsPart]


class RowSink:
    """The engine's end.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PUSH, address)
        self._socket.immediate = True  # where nobody listens, nothing is queued
        self._socket.connect(address)
        self.address, self._name = address, secrets.token_hex(4)
        self.sent = self.dropped = 0
        """Steps."""

    def send(self, parts: Sequence[RowsPart], token_ids: IntArray, hidden: torch.Tensor) -> bool:
        """Send a step's rows, or drop them; False: there was no room.

        Args:
            parts: whose rows they are, in their order.
            token_ids: [rows] int32.
            hidden: [rows, layers + 1, width].
        """
        rows = hidden.contiguous().cpu()
        width = (rows.shape[1], rows.shape[2])
        header = _Header(
            self._name, self.sent + self.dropped, str(rows.dtype).removeprefix("torch."), width, list(parts)
        )
        frames: list[Any] = [
            msgspec.msgpack.encode(header),
            np.ascontiguousarray(token_ids, dtype="<i4"),
            rows.view(torch.uint8).numpy(),
        ]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        self.sent += 1
        return True

    def send_ends(self, output_head: torch.Tensor, embedding: torch.Tensor) -> bool:
        """What a trainer has of the target itself, [vocab, width] each, before the first rows of new weights."""
        own = [output_head] if output_head is embedding else [output_head, embedding]
        return self.send([], np.arange(len(output_head), dtype=np.int32), torch.stack(own, dim=1))

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
        self._next: dict[str, int] = {}
        self.lost = 0
        """Steps that engines had no room for."""
        self.ends: tuple[torch.Tensor, torch.Tensor] | None = None
        """Output head and embedding, [vocab, width] each, that a target has had since; see `RowSink.send_ends`."""

    def __iter__(self) -> Iterator[Rows]:
        """All that come, for ever."""
        while True:
            yield from self.arrived(60.0)

    def arrived(self, timeout_s: float = 0.0) -> Iterator[Rows]:
        """What is whole by now; waits so long for the first rows."""
        while self._socket.poll(math.ceil(timeout_s * 1e3)):
            yield from self._take(*self._socket.recv_multipart())
            timeout_s = 0.0

    def close(self) -> None:
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)

    def _take(self, said: bytes, tokens: bytes, hidden: bytes) -> Iterator[Rows]:
        header = msgspec.msgpack.decode(said, type=_Header)
        self.lost += max(header.number - self._next.get(header.sender, 0), 0)
        self._next[header.sender] = header.number + 1
        token_ids = np.frombuffer(tokens, dtype="<i4")
        rows = np.frombuffer(hidden, dtype=np.uint8).reshape(len(token_ids), header.width[0], -1)
        if not header.parts:
            ends = torch.from_numpy(rows.copy()).view(_DTYPES[header.dtype])
            self.ends = ends[:, 0], ends[:, -1]
        begin = 0
        for part in header.parts:
            own = slice(begin, begin := begin + part.count)
            if part.begin == 0:  # one that was preempted begins anew
                self._open.pop(part.name, None)
                self._open[part.name] = _OpenAnswer(part, header)
                while len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)
            answer = self._open.pop(part.name, None)
            if answer is None or not answer.goes_on(part, header):
                continue
            answer.add(token_ids[own], rows[own])
            if answer.have == part.total:
                yield answer.rows
            else:
                self._open[part.name] = answer


class _OpenAnswer:
    """An answer of which rows are missing."""

    def __init__(self, part: RowsPart, header: _Header) -> None:
        self.have, self._of = 0, (part.total, part.version, header.dtype, header.width)
        hidden = torch.empty((part.total, *header.width), dtype=_DTYPES[header.dtype])
        token_ids = torch.empty(part.total, dtype=torch.int32)
        self.rows = Rows(token_ids, part.prompt_tokens, part.version, hidden)

    def goes_on(self, part: RowsPart, header: _Header) -> bool:
        """Whether the part follows what is there, of the same weights."""
        return (part.total, part.version, header.dtype, header.width) == self._of and part.begin == self.have

    def add(self, token_ids: IntArray, rows: npt.NDArray[np.uint8]) -> None:
        end = self.have + len(token_ids)
        self.rows.token_ids.numpy()[self.have : end] = token_ids
        self.rows.hidden.view(torch.uint8).numpy()[self.have : end] = rows
        self.have = end


def _socket(kind: int, address: str) -> zmq.Socket[bytes]:
    if not address.startswith("ipc:///"):
        raise ConfigError(f"`{address[:140]}` is no address for rows", "write ipc:///PATH: they stay on the host")
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.linger = 0
    made.sndhwm = made.rcvhwm = HIGH_WATER
    return made
