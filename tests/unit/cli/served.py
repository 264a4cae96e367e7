"""A server on this host for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def serving(answer: Callable[[str, Message], tuple[int, str]]) -> Iterator[str]:
    """Its address.

    Args:
        answer: path and headers -> status and body.
    """

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path, self.headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    own = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=own.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{own.server_port}"
    finally:
        own.shutdown()
        own.server_close()
        thread.join()
