"""The coordinator's process: it hears, decides and commands, until its parent is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_specrollout.cluster.group.channel import Hub, ZmqHub, wait
from vllm_specrollout.cluster.group.coordinator import Coordinator, Rules
from vllm_specrollout.cluster.group.messages import Report

_POLL_S = 0.2


def turn(coordinator: Coordinator, hub: Hub, now: float) -> None:
    """Once around."""
    for worker, message in hub.receive():
        if isinstance(message, Report):
            coordinator.hear(worker, message, now)
    for worker, command in coordinator.decide(now):
        hub.send(worker, command)


def serve(address: str, rules: Rules, is_over: Callable[[], bool] = lambda: False) -> None:
    """Coordinate the workers that connect to an ipc address.

    Raises:
        ConfigError, MailboxError: the address cannot be used.
    """
    coordinator, hub = Coordinator(rules), ZmqHub(address)
    try:
        while not is_over():
            wait([hub], _POLL_S)
            turn(coordinator, hub, time.monotonic())
    finally:
        hub.close()
