"""verl's router, which has idle replicas lend their drafters besides: `router_class` of `router_config_path`.

    router_class: vllm_specrollout.verl.LadderRouter
    drafter: SMALL

Requests go where verl's own router sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from vllm_specrollout.cluster.ray.trainer import asking, lend
from vllm_specrollout.config.checks import nearest
from vllm_specrollout.errors import ConfigError

KEYS = {"drafter": "drafter", "drafter_devices": "devices", "drafter_engine": "drafter_engine", "most": "most"}
"""Key of the file -> argument of `lend`."""
OTHERS = ("router_class", "full_determinism")


class LadderRouter(GlobalRequestLoadBalancer):
    """
    Args:
        servers: address -> verl's server.
        config: the file that names this class. Beside `KEYS`, `full_determinism` is verl's own setting, which verl
            hands to no router but its own.

    Raises:
        ConfigError: an unknown key.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        known = (*KEYS, *OTHERS)
        for key in config:
            if key not in known:
                near = nearest(key, known)
                way = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"
                raise ConfigError(f"unknown key `{key}` in the router's file", way)
        super().__init__(servers, full_determinism=bool(config.get("full_determinism", False)))
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
