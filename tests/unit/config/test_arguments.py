"""Typos in a group's arguments: each is one error with its cause and a way out, before Ray or an engine is begun."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray import placement
from vllm_specrollout.cluster.ray.placement import Needs
from vllm_specrollout.config import arguments
from vllm_specrollout.errors import ConfigError


class Begun(Exception):
    """Ray was asked for something."""


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host of two cores without a GPU, on which no Ray runs, and which cannot ask the hub."""

    def begun(*args: Any, **given: Any) -> None:
        raise Begun(*args)

    for name in ("init", "remote", "nodes"):
        monkeypatch.setattr(ray, name, begun)
    monkeypatch.setattr(placement, "placement_group", begun)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(arguments, "count_gpus", lambda: 0)
    monkeypatch.setattr(placement, "count_gpus", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)


TYPOS: list[tuple[dict[str, Any], str]] = [
    # a model that is nowhere
    ({"model": "/models/qwen"}, "`model` is '/models/qwen', and host .* has no such folder"),
    ({"model": "./qwen"}, "has no such folder"),
    ({"model": "Qwen/Qwen0.5"}, "`model` is 'Qwen/Qwen0.5': no folder, not in the cache .* the hub is switched off"),
    ({"model": ""}, "`model` is ''"),
    ({"drafters": ["/models/small"], "ladder": "attach"}, "`drafters` is '/models/small'"),
    ({"drafters": ["smal"], "ladder": "attach"}, "`drafters` is 'smal': no folder"),
    # arguments that nobody has
    ({"engine": {"max_num_seq": 4}}, "`engine` has 'max_num_seq'.*did you mean `max_num_seqs`"),
    ({"engine": {"zzz": 4}}, "`engine` has 'zzz'.*vllm serve --help"),
    ({"drafter_engine": {"dtyp": "half"}}, "`drafter_engine` has 'dtyp'.*did you mean `dtype`"),
    ({"spec_rollout": {"budgets": "auto"}}, "unknown key `budgets`.*did you mean `budget`"),
    ({"ladder": "atach"}, "`ladder` names 'atach'"),
    # devices that are not there
    ({"devices": ["cuda:0", "cuda:1"]}, "`devices` names cuda:0, and this host has no GPUs"),
    ({"devices": ["cpu:0", "cpu:7"]}, "`devices` names cpu:7, and this process may use the cores 0-1"),
    ({"gpus": 1.0}, r"`gpus` is 1\.0, and this host has no GPU"),
    # more than there is
    ({"engines": 64}, "`engines` is 64, .* and this host has 2 cores"),
    ({"engine": {"tensor_parallel_size": 2}}, r"`engines` is 2, with 2 rank\(s\) each"),
    ({"cpus": 64.0}, r"`cpus` is 64\.0, and this host has 2 cores"),
]


@pytest.mark.parametrize(("given", "what"), TYPOS, ids=lambda one: str(one)[:40])
def test_a_typo_is_one_error_with_a_way_out_and_nothing_is_begun(given: dict[str, Any], what: str) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=f"(?s){what}") as error:
        SpecGroup(**{"model": "model", **given})
    assert error.value.hint


def test_a_ray_that_is_no_more_is_said_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"`RAY_ADDRESS` is '{address}', and nobody answers") as error:
            SpecGroup("model")
        assert error.value.hint


def test_what_has_no_typo_begins_ray() -> None:
    with pytest.raises(Begun, match="local"):
        SpecGroup("model")


def test_a_ray_that_runs_on_this_host_is_joined_and_named_where_none_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joined: list[Any] = []
    needs = Needs("", {"model": "model"}, ("model",), 1, None, None, 1.0, 0)
    monkeypatch.setattr(ray, "init", lambda address, **given: joined.append(address))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with caplog.at_level(logging.INFO, "vllm.specrollout"):
            assert not placement._connect(needs)
        assert f"joins the Ray that runs at {address}" in caplog.text
    assert placement._connect(needs), "one that was killed leaves its address behind"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert placement._connect(needs)
    assert joined == [address, "local", "local"]


def test_a_name_in_this_hosts_cache_is_known(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    arguments.check_name("Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize(("status", "is_known"), [(200, True), (404, False), (401, False), (503, True), (0, False)])
def test_the_hub_is_asked_for_a_name_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, is_known: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text("secret\n")
    asked = []

    def answer(request: Any, timeout: float) -> socket.socket:
        asked.append((request.full_url, request.get_header("Authorization")))
        if status == 0:
            raise arguments.urllib.error.URLError("no route")
        if status != 200:
            raise arguments.urllib.error.HTTPError(request.full_url, status, "", {}, None)  # type: ignore[arg-type]
        return socket.socket()

    monkeypatch.setattr("urllib.request.urlopen", answer)
    unknown = pytest.raises(ConfigError, match="has no such name|cannot be asked: no route")
    with contextlib.nullcontext() if is_known else unknown:
        arguments.check_name("Qwen/Qwen2.5-0.5B")
    assert asked == [("https://huggingface.co/api/models/Qwen/Qwen2.5-0.5B", "Bearer secret")]


def test_gpus_are_counted_as_this_process_may_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("os.path.exists", lambda path: False)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/dev/nvidia{name}") for name in ("0", "3", "ctl", "-uvm")])
    for seen, count in (("0,1,2", 2), ("0", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert arguments.count_gpus() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert arguments.count_gpus() == 2
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/kfd")
    assert arguments.count_gpus() is None, "others' GPUs are not counted"


def test_a_driver_without_vllm_leaves_names_to_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments.known_arguments.cache_clear()
    arguments.check_engine({"zzz": 4})
    arguments.known_arguments.cache_clear()
