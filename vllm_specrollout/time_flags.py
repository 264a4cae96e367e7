"""From the text of a flag, or a JSON file, to what drafting and verifying take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specrollout.decoupled.times import AffineTime, TimeFit, fit_time
from vllm_specrollout.errors import ConfigError

_NUMBER = r"(\d+(?:\.\d+)?)"
_LINE = re.compile(rf"{_NUMBER}\+{_NUMBER}(?:\*b)?(?:\+{_NUMBER}(?:\*n)?)?")
_TERMS = ("fixed_ms", "per_request_ms", "per_row_ms")


def draft_time(text: str, flag: str, *, has_rows: bool = False) -> AffineTime:
    """`0.8+0.002*b` -> D(b) in milliseconds; `*b` may be left out.

    Args:
        has_rows: a third term may follow, of each node that a drafter of trees looks at beside a request's first row.

    Raises:
        ConfigError: it is no such line, or one with a third term.
    """
    time = _line(text, flag, f"write fixed + per request, for example `{flag} 0.8+0.002*b`")
    if time.per_row_ms and not has_rows:
        raise ConfigError(
            f"`{flag}` is {text!r}, with a time per row", "formulas have one row per request; trees need `--rehearse`"
        )
    return time


def verify_times(text: str, flag: str, devices: tuple[int, ...]) -> dict[int, AffineTime]:
    """`13+0.04*b+0.03*n,8+...` -> V(b, w) by number of devices, in ascending order.

    Raises:
        ConfigError: a line is wrong, or there is not one per number of devices.
    """
    example = "`13+0.04*b+0.03*n`: fixed + per request + per drafted row"
    lines = [_line(part, flag, f"write {example}") for part in text.split(",")]
    if len(lines) != len(devices):
        raise ConfigError(
            f"`{flag}` holds {len(lines)} lines for {len(devices)} verifiers",
            f"give one per verifier, with commas between them: {example}",
        )
    return dict(zip(devices, lines, strict=True))


def read_profile(path: Path, flag: str) -> tuple[TimeFit, dict[int, TimeFit]]:
    """A drafter's line and a verifier's by number of devices, from `{"draft": TIME, "verify": {"4": TIME}}`.

    A TIME is `{"fixed_ms": A, "per_request_ms": B, "per_row_ms": C}`, or `{"rows": [[batch, ms], ...]}` to be fitted,
    with drafts of each request between the two where a verifier had any.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    body = _object(path, flag)
    verify = body.get("verify")
    if set(body) != {"draft", "verify"} or not isinstance(verify, dict) or not verify:
        raise ConfigError(
            f"`{path}` does not hold the times of a drafter and of a verifier",
            'write {"draft": TIME, "verify": {"1": TIME, "2": TIME}}',
        )
    for devices in verify:
        if not devices.isdecimal() or not 1 <= int(devices) <= 1 << 16:
            raise ConfigError(f"`{path}` has a verifier on {devices!r} devices", "give a whole number above 0")
    fits = {int(devices): _time(time, path, f"verify.{devices}") for devices, time in verify.items()}
    return _time(body["draft"], path, "draft"), dict(sorted(fits.items()))


def _line(text: str, flag: str, way: str) -> AffineTime:
    match = _LINE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(f"`{flag}` holds {text.strip()!r}, which is no line in milliseconds", way)
    fixed, per_request, per_row = match.groups(default="0")
    return AffineTime(float(per_request), float(fixed), float(per_row))


def _object(path: Path, flag: str) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be read as JSON: {error}", "name a JSON file") from None
    if not isinstance(body, dict):
        raise ConfigError(f"`{flag}` is `{path}`, which holds no JSON object", "see `--help` for what it holds")
    return body


def _time(value: Any, path: Path, name: str) -> TimeFit:
    try:
        if isinstance(value, Mapping) and set(value) == {"rows"}:
            return _fit(value["rows"])
        if isinstance(value, Mapping) and {"fixed_ms"} <= set(value) <= set(_TERMS):
            fixed, per_request, per_row = (_number(value.get(term, 0.0)) for term in _TERMS)
            return TimeFit(AffineTime(per_request, fixed, per_row), 0.0, 0.0)
        raise TypeError("neither the terms of a line nor rows")
    except ConfigError as error:
        raise ConfigError(f"`{name}` in `{path}`: {error.cause}", error.hint) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`{name}` in `{path}` is no time: {error}",
            'write {"fixed_ms": A, "per_request_ms": B, "per_row_ms": C} or {"rows": [[batch, ms], ...]}',
        ) from None


def _fit(rows: Any) -> TimeFit:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) in (2, 3) for row in rows):
        raise TypeError("rows are [batch, ms] or [batch, drafts, ms]")
    batches = [_number(row[0]) for row in rows]
    drafts = [_number(row[1]) if len(row) == 3 else 0.0 for row in rows]
    return fit_time(batches, [_number(row[-1]) for row in rows], drafts)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)
