"""The bodies that take a server longest for their size: many keys, many objects, many rewards. Pure."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specrollout.reports import MAX_REWARDS

EXTRA, EIGHT, EMPTY, VALID = "unknown keys", "rewards of unknown keys", "empty rewards", "valid rewards"
KINDS = (EXTRA, EIGHT, EMPTY, VALID)
_WRONG = ",".join(f'"{letter}":1' for letter in "abcdefghijklmnopq")


def body(kind: str, most: int) -> bytes:
    """As long as its kind gets in so many bytes; lists have at most as many rewards as a report may."""
    if kind == EXTRA:
        return _filled('{"rewards":[],', lambda i: f'"{i:x}":0', "}", most, most)
    entry = {
        EIGHT: lambda i: "{" + _WRONG + "}",
        EMPTY: lambda i: "{}",
        VALID: lambda i: f'{{"request_id":"chatcmpl-{i:030d}","reward":1.0}}',
    }[kind]
    return _filled('{"rewards":[', entry, "]}", most, MAX_REWARDS)


def _filled(start: str, entry: Callable[[int], str], end: str, most_bytes: int, most: int) -> bytes:
    entries, size = list[str](), len(start) + len(end)
    for i in range(most):
        text = entry(i)
        size += len(text) + 1
        if size > most_bytes:
            break
        entries.append(text)
    return (start + ",".join(entries) + end).encode()
