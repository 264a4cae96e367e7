"""ZeroMQ contexts that end when they are told to, never when they are forgotten.

pyzmq ends a context that nobody holds, and waits for its sockets meanwhile. The garbage collector may take both at
once, and the context first: then nobody closes the sockets, and the process waits for ever. So this module holds every
context until it is ended.
"""

from __future__ import annotations

import zmq

_open: set[zmq.Context[zmq.Socket[bytes]]] = set()


def new() -> zmq.Context[zmq.Socket[bytes]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _open.add(made)
    return made


def end(context: zmq.Context[zmq.Socket[bytes]], linger_ms: int = 0) -> None:
    """Close its sockets, wait so long for what they still send, and end it. A second time does nothing."""
    context.destroy(linger=linger_ms)
    _open.discard(context)
