"""In what the supported vLLM versions differ, as far as our code has to know: one row per version, read here alone.

What belongs here: facts about a version that some part of ours asks for. Nothing else compares versions. How the source
of each version is known again is in `supported.py`, which patches a version needs is said by each patch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vllm_specrollout.patches import supported


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What one vLLM version does, where versions differ."""

    runners: tuple[Literal["V1", "V2"], ...]
    """The model runners that spec rollout supports: the identity suite has passed on them."""
    cpu_noise: Literal["integer", "vector"]
    """What a token's noise is drawn as on the V1 runner: an integer that seeds Gumbel noise, or an exponential variate
    per entry of the vocabulary."""
    v2_noise: Literal["murmur", "philox"]
    """Where the V2 runner's Gumbel noise comes from: a hash of seed, position and token, or Philox streams."""
    processors_know_lengths: bool
    """Whether the V2 runner tells its processors of logits how long sequences may be."""
    captures_drafts: bool
    """Whether steps with branches get CUDA graphs on the V2 runner: vLLM has what they are captured with."""
    drafts_few: bool
    """Whether the V2 runner's speculators may be asked for fewer tokens than their steps have drafts."""
    has_v2_models: bool
    """Whether it has a speculator for small models."""
    speculates_by: Literal["config", "tokens"]
    """What makes the V1 runner give draft tokens rows of logits: `speculative_config`, or that some are scheduled."""
    counts_field: str
    """The table of numbers in `SchedulerStats` on which a worker's counts travel: the engine core leaves it open."""
    places_field: str
    """The scheduler's number of requests that may run at once."""
    mask_stride: Literal["drafted", "fixed"]
    """Rows of a grammar's mask per request: one more than it drafted, or as many as any request may have."""
    returns_experts: bool
    """Whether the experts of each token follow a step's rows; older versions keep them by KV slots, which we move."""
    returns_masks: bool
    """Whether a step may bring several masks of what a request's tokens were sampled from."""


_NEWEST = Features(
    runners=("V1", "V2"),
    cpu_noise="integer",
    v2_noise="murmur",
    processors_know_lengths=True,
    captures_drafts=True,
    drafts_few=True,
    has_v2_models=True,
    speculates_by="config",
    counts_field="num_kv_fetch_reqs_by_stage",
    places_field="max_num_active_reqs",
    mask_stride="fixed",
    returns_experts=True,
    returns_masks=True,
)
_0_32 = replace(_NEWEST, mask_stride="drafted")
_0_31 = replace(
    _0_32,
    cpu_noise="vector",
    drafts_few=False,
    speculates_by="tokens",
    counts_field="waiting_lora_adapters",
    returns_masks=False,
)
_0_29 = replace(
    _0_31,
    v2_noise="philox",
    processors_know_lengths=False,
    captures_drafts=False,
    has_v2_models=False,
    returns_experts=False,
    places_field="max_num_running_reqs",
)

TABLE: Mapping[str, Features] = {
    "0.29.0": _0_29,
    "0.31.0": _0_31,
    "0.32.0": _0_32,
    "0.33.0": _NEWEST,
}
"""Version -> its row, newest last. These are the versions that patches are declared for."""


def since(first: str) -> tuple[str, ...]:
    """The versions from this one on; for patches that older ones have no place for."""
    versions = tuple(TABLE)
    return versions[versions.index(first) :]


def until(last: str) -> tuple[str, ...]:
    """The versions up to this one."""
    versions = tuple(TABLE)
    return versions[: versions.index(last) + 1]


ALL = tuple(TABLE)


@functools.cache
def installed() -> Features:
    """The row of the installed vLLM.

    Raises:
        UnsupportedError: its version has none.
    """
    version = supported.installed_vllm()
    problem = supported.version_problem(version)
    if problem is not None:
        raise problem
    assert version is not None
    return TABLE[version]
