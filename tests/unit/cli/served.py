"""Servers on this host, for as long as a test needs one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Work = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(work: Work) -> Iterator[str]:
    """The address of one that does what it likes."""

    class Own(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # whoever asked may have left
                work(self)

        def log_message(self, *_: Any) -> None:
            pass

    own = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=own.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{own.server_port}"
    finally:
        own.shutdown()
        own.server_close()
        thread.join()


def answering(status: int, body: bytes = b"", **headers: str) -> Work:
    def work(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return work
