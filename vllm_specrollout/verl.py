"""verl's router, which keeps a problem's samples together: `router_class` of `router_config_path`.

    router_class: vllm_specrollout.verl.ProblemRouter

`LadderRouter` besides has idle replicas lend their drafters:

    router_class: vllm_specrollout.verl.LadderRouter
    drafter: SMALL
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cachetools import LRUCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from vllm_specrollout.cluster.ray.trainer import asking, lend
from vllm_specrollout.config.checks import check_range, nearest
from vllm_specrollout.errors import ConfigError

KEYS = {"drafter": "drafter", "drafter_devices": "devices", "drafter_engine": "drafter_engine", "most": "most"}
"""Key of the file -> argument of `lend`."""
OTHERS = ("router_class", "full_determinism", "slack")
SLACK = 16
"""A group: 64 groups of 16 stay whole on eight replicas, and no replica has more than another."""
_PROBLEMS = 1 << 16


class ProblemRouter(GlobalRequestLoadBalancer):
    """A problem's first sample goes to the replica with the fewest requests, and the others follow: siblings draft
    for each other. A replica that has `slack` requests more than another one gets none until that has changed.

    Args:
        servers: address -> verl's server.
        config: the file that names this class. `slack`: requests; `full_determinism`: verl's own setting, which verl
            hands to no router but its own, and which leaves problems where they fall.

    Raises:
        ConfigError: an unknown key, or a slack out of range.
    """

    keys: tuple[str, ...] = OTHERS

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        for key in config:
            if key not in self.keys:
                near = nearest(key, self.keys)
                way = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(self.keys)}"
                raise ConfigError(f"unknown key `{key}` in the router's file", way)
        self._slack = config.get("slack", SLACK)
        check_range("slack", self._slack, 1, 1 << 20)
        super().__init__(servers, full_determinism=bool(config.get("full_determinism", False)))
        # hash of a problem's prompt -> its replica
        self._homes: LRUCache[int, str] = LRUCache(_PROBLEMS)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] | None = None) -> tuple[str, Any]:
        """As verl's; a further turn of a request goes where its first one went, whatever its prompt is by then."""
        loads = self._inflight_requests
        is_new = self._request_id_to_server.get(request_id) not in loads
        if prompt_ids and loads and is_new and not self._full_determinism:
            self._request_id_to_server[request_id] = self._home(hash(tuple(prompt_ids)))
        found: tuple[str, Any] = super().acquire_server(request_id)
        return found

    def _home(self, problem: int) -> str:
        loads = self._inflight_requests
        if not any(loads.values()):
            self._homes.clear()  # another rollout: problems are dealt anew, and so evenly
        least = min(loads, key=lambda one: loads[one])
        home = self._homes.get(problem)
        if home not in loads:
            self._homes[problem] = home = least
        return home if loads[home] - loads[least] < self._slack else least


class LadderRouter(ProblemRouter):
    """
    Args:
        servers: address -> verl's server.
        config: the file that names this class: `KEYS`, and those of `ProblemRouter`.

    Raises:
        ConfigError: an unknown key, or a slack out of range.
    """

    keys = (*KEYS, *OTHERS)

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(servers, config)
        self.lending = lend(servers, **{KEYS[key]: value for key, value in config.items() if key in KEYS})

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        super().add_servers(servers)
        self.lending.add({name: asking(server) for name, server in servers.items()})

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        self.lending.remove(server_ids)

    def get_status(self) -> dict[str, Any]:
        """verl's, and what `Lending.status` says."""
        return {**super().get_status(), "lending": self.lending.status()}
