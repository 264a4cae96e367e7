"""Records as lines of JSON and back.

May enter: the records. May not: files. A line that cannot be read, or holds what no engine writes (checked.py), raises
ValueError, KeyError or TypeError; files.py says which line it was. Probabilities are kept in thousandths of a nat,
times in microseconds.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from vllm_specrollout.replay import checked
from vllm_specrollout.replay.records import UNLIMITED, VERSION, Arrival, Candidates, End, Header, Record, Step, Verified
from vllm_specrollout.types import ROOT, DraftMode, DraftTree, FloatArray, IntArray, StepTiming

MAGIC = "vllm-specrollout trace"
MOST_ID = 2**31 - 1
_NATS = 1000.0
_TIMING = tuple(f.name for f in dataclasses.fields(StepTiming))


def encode(record: Record) -> str:
    """One line, without its end."""
    if isinstance(record, Header):
        facts = {"trace": MAGIC, "version": VERSION, **dataclasses.asdict(record), "timing": list(_TIMING)}
        return _text(facts)
    if isinstance(record, Arrival):
        values = dataclasses.asdict(record)
        values["shape"] = record.shape.value
        values["ready_ms"] = _ms(record.ready_ms)
        if record.max_draft_tokens == UNLIMITED:
            del values["max_draft_tokens"]
        return _text({"kind": "arrival", **values})
    if isinstance(record, End):
        values = {"request": record.request, "status": record.status, "weights_version": record.weights_version}
        return _text({"kind": "end", **values, "tokens": record.token_ids.tolist()})
    return _text(
        {
            "kind": "step",
            "at_ms": _ms(record.at_ms),
            "ask_ms": _ms(record.ask_ms),
            "views": record.views,
            "timing": None if record.timing is None else [_number(getattr(record.timing, n)) for n in _TIMING],
            "verified": [[v.request, v.drafted, v.accepted] for v in record.verified],
            "drafts": [_encode_candidates(candidates) for candidates in record.candidates],
        }
    )


def decode_header(line: str) -> tuple[int, Header | None, tuple[str, ...]]:
    """Version, header (None if the version is not ours) and the names of a timing's columns.

    Raises:
        ValueError: the line opens no trace.
    """
    values = checked.mapping(json.loads(line))
    if values.get("trace") != MAGIC:
        raise ValueError("it does not name itself one")
    version = checked.whole(values["version"])
    if version != VERSION:
        return version, None, ()
    known = {f.name for f in dataclasses.fields(Header)}
    facts = {name: value for name, value in values.items() if name in known}
    facts["drafters"] = tuple(map(checked.text, checked.listed(facts.get("drafters", []))))
    return version, checked.header(facts), tuple(map(checked.text, checked.listed(values["timing"])))


def decode(line: str, timing: tuple[str, ...] = _TIMING) -> Record:
    """The record of a line that is not the header; `timing` names the columns of its timings."""
    values = checked.mapping(json.loads(line))
    kind = values.pop("kind")
    if kind == "arrival":
        values["shape"] = DraftMode(values["shape"])
        return checked.arrival(values)
    if kind == "end":
        return End(
            request=checked.whole(values["request"]),
            status=checked.status(values["status"]),
            token_ids=_ints(checked.listed(values["tokens"]), 0),
            weights_version=checked.whole(values["weights_version"]),
        )
    if kind != "step":
        raise ValueError(f"unknown kind {kind!r:.80}")
    return Step(
        at_ms=checked.real(values["at_ms"]),
        ask_ms=checked.real(values["ask_ms"]),
        views=checked.whole(values["views"]),
        timing=_decode_timing(values["timing"], timing),
        verified=tuple(Verified(*map(checked.whole, row)) for row in checked.listed(values["verified"])),
        candidates=tuple(_decode_candidates(row) for row in checked.listed(values["drafts"])),
    )


def _encode_candidates(candidates: Candidates) -> list[Any]:
    tree = candidates.tree
    sources = tree.source.tolist()
    # nearly all trees come from one drafter
    source: Any = sources[0] if sources and len(set(sources)) == 1 else sources
    nats = np.rint(tree.log_q * -_NATS).astype(np.int64).tolist()
    return [candidates.request, candidates.position, tree.token_ids.tolist(), tree.parents.tolist(), nats, source]


def _decode_candidates(row: list[Any]) -> Candidates:
    request, position, tokens, parents, nats, source = row
    log_q: FloatArray = (np.asarray(list(map(checked.whole, nats)), dtype=np.float64) / -_NATS).astype(np.float32)
    sources = source if isinstance(source, list) else [source] * len(tokens)
    tree = DraftTree(_ints(tokens, 0), _ints(parents, ROOT), log_q + np.float32(0.0), _ints(sources, 0))
    checked.tree(tree)
    return Candidates(checked.whole(request), checked.whole(position), tree)


def _decode_timing(row: list[Any] | None, columns: tuple[str, ...]) -> StepTiming | None:
    if row is None:
        return None
    return checked.timing({name: value for name, value in zip(columns, row, strict=True) if name in _TIMING})


def _ints(values: list[Any], least: int) -> IntArray:
    """[N] int32. Raises: one is no whole number, below the least, or beyond 31 bits."""
    return np.asarray([checked.whole(value, least, MOST_ID) for value in values], dtype=np.int32)


def _ms(value: float) -> float:
    return round(float(value), 3)


def _number(value: Any) -> Any:
    return _ms(value) if isinstance(value, float) else value


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))
