"""Arguments of a group's engines, looked at before anything is begun: what is wrong with them is said in seconds.

Which arguments vLLM knows is read from its source, and nothing of it is imported: that takes longer than many typos.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specrollout.config.checks import nearest
from vllm_specrollout.config.devices import Devices
from vllm_specrollout.config.engine import parse
from vllm_specrollout.errors import ConfigError, shown, shown_path

KNOCK_S = 2.0
"""Seconds that an address has to answer."""
_HUB_S = 3.0
_TRUE = ("1", "true", "on", "yes")


def check_engine(engine: Mapping[str, Any], name: str = "engine") -> None:
    """
    Raises:
        ConfigError: an argument that vLLM's engine does not have, or a key that spec rollout does not.
    """
    known = known_arguments()
    for key in engine if known else ():
        if key not in known:
            near = nearest(key, known)
            way = f"did you mean `{near[0]}`?" if near else "`vllm serve --help` lists them, as --max-num-seqs"
            raise ConfigError(f"`{name}` has {shown(key)}, which is no argument of vLLM's engine", way)
    parse(engine.get("spec_rollout", True))


@functools.cache
def known_arguments() -> frozenset[str]:
    """Of vLLM's engine, and ours; none: vLLM is not installed here."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    try:
        source = Path(found.origin).with_name("engine") / "arg_utils.py"
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    bodies = [one.body for one in tree.body if isinstance(one, ast.ClassDef) and one.name.endswith("EngineArgs")]
    names = [
        own.target.id
        for body in bodies
        for own in body
        if isinstance(own, ast.AnnAssign) and isinstance(own.target, ast.Name)
    ]
    return frozenset([*names, "spec_rollout"]) if names else frozenset()


def check_folder(model: str, name: str = "model") -> None:
    """
    Raises:
        ConfigError: it is a folder's name, and this host has none of that.
    """
    if _is_folder(model) and not os.path.exists(os.path.expanduser(model)):
        cause = f"`{name}` is {shown_path(model)}, and host {socket.gethostname()} has no such folder"
        raise ConfigError(cause, "mind the spelling; engines on several hosts need it on each")


def check_name(model: Any, name: str = "model") -> None:
    """
    Raises:
        ConfigError: neither this host nor the hub has a model of this name.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"`{name}` is {shown(model)}", "give a folder, or a name at the hub")
    if _is_folder(model) or os.path.exists(model):
        return
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in _TRUE or _is_cached(model):
        return
    if any(os.environ.get(key, "").lower() in _TRUE for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise ConfigError(
            f"`{name}` is {shown(model)}: no folder, not in the cache of this host, and the hub is switched off",
            "give a model's folder; or unset HF_HUB_OFFLINE, and it is downloaded",
        )
    if (problem := _problem_at_hub(model)) is not None:
        raise ConfigError(
            f"`{name}` is {shown(model)}: no folder, not in the cache of this host, and {problem}",
            "mind the spelling, or give a model's folder; a name that not everybody may see needs HF_TOKEN",
        )


def _is_folder(model: str) -> bool:
    return model[0] in "/.~" or model.count("/") > 1


def _home() -> Path:
    """Where the hub's own library keeps what it knows."""
    own = os.environ.get("HF_HOME")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"))


def _is_cached(model: str) -> bool:
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub")
    return any(cache.joinpath(f"models--{model.replace('/', '--')}", "snapshots").glob("*/config.json"))


def _problem_at_hub(model: str) -> str | None:
    """Why it cannot be had from there; None: it can."""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(f"{hub.rstrip('/')}/api/models/{model}", method="HEAD")
    with contextlib.suppress(OSError):
        if token := os.environ.get("HF_TOKEN") or (_home() / "token").read_text(encoding="utf-8").strip():
            request.add_header("Authorization", f"Bearer {token}")
    try:
        urllib.request.urlopen(request, timeout=_HUB_S).close()
    except urllib.error.HTTPError as error:
        return f"{hub} has no such name" if error.code in (401, 404) else None
    except (OSError, ValueError) as error:
        return f"{hub} cannot be asked: {getattr(error, 'reason', error)}"
    return None


def check_devices(devices: Sequence[Devices] | None) -> None:
    """
    Raises:
        ConfigError: a core or a GPU that this host does not have.
    """
    cores, gpus = os.sched_getaffinity(0), count_gpus()
    for one in devices or ():
        if one.kind == "cuda" and gpus is not None and max(one.numbers) >= gpus:
            raise ConfigError(
                f"`devices` names cuda:{max(one.numbers)}, and this host has {gpus or 'no'} GPU{'s' * (gpus != 1)}",
                "name GPUs from 0 on that are there, or cores, as cpu:0-3",
            )
        if one.kind == "cpu" and (missing := [core for core in one.numbers if core not in cores]):
            raise ConfigError(
                f"`devices` names cpu:{missing[0]}, and this process may use the cores {_ranges(cores)}",
                "name cores of those, or leave `devices` out",
            )


def count_gpus() -> int | None:
    """Of this host, as this process may see them; None: nobody knows."""
    if any(os.path.exists(path) for path in ("/dev/dxg", "/dev/kfd")):
        return None
    here = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return here if seen is None else min(here, len([one for one in seen.split(",") if one.strip() not in ("", "-1")]))


def check_answers(name: str, address: str) -> None:
    """See that somebody listens there: whoever connects would try on for minutes.

    Args:
        address: HOST:PORT, with or without a scheme.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except (OSError, ValueError, OverflowError) as error:
        cause = f"`{name}` is {shown(address)}, and nobody answers there: {error}"
        raise ConfigError(cause, f"start Ray there, or unset {name}: then one is started here") from None


def _ranges(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    if found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ", ".join(map(str, found))
