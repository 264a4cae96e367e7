"""Checks of a group's arguments, before anything is begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specrollout.cluster.ladder import LADDERS
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.config.devices import Devices, check_apart, parse_devices
from vllm_specrollout.errors import ConfigError


def check_places(devices: Sequence[str] | None, engines: int) -> list[Devices] | None:
    """Of each engine."""
    if devices is None:
        return None
    if len(devices) != engines:
        raise ConfigError(f"`devices` names {len(devices)} places for {engines} engines", "name one for each")
    places = [parse_devices("devices", one) for one in devices]
    check_apart("devices", places)
    return places


def check_group(
    engines: int,
    ladder: str,
    drafters: Sequence[str],
    spec_rollout: bool | Mapping[str, Any],
    most: int,
    *,
    is_auto: bool,
) -> None:
    check_range("engines", engines, 1, 4096)
    check_range("most", most, 1, 4096)
    check_choice("ladder", ladder, LADDERS)
    if isinstance(drafters, str) or not all(isinstance(model, str) and model for model in drafters):
        raise ConfigError(f"`drafters` is {drafters!r}", "give a list of models")
    if is_auto and ladder != "off":
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` is 'auto'", "drop `ladder`: it is chosen as well")
    if ladder == "attach" and not drafters:
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` names none", "name the models that are to help")
    if ladder in ("off", "move") and drafters:
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` is {list(drafters)!r}", "choose 'attach'")
    if not spec_rollout:
        raise ConfigError(
            "`spec_rollout` is off, and without it no request can go on elsewhere",
            'set {"budget": "off"} to decode plainly',
        )
