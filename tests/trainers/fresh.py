"""The built wheel beside each trainer's own requirements, each in an environment made for it: what does doctor say?

    python -m tests.trainers.fresh
    python -m tests.trainers.fresh verl --keep

Each environment gets vLLM for CPU as pinned, then what the trainer asks for as pip resolves it, then our wheel. What
only CUDA machines can install is left out and named. It takes some minutes and 5 GB per trainer; then it is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAINERS = ("trl", "verl", "openrlhf")
CUDA_ONLY = re.compile(r"(?i)(flash[-_]attn|deepspeed|bitsandbytes|liger[-_]kernel|nvidia|vllm)\b")
"""Requirements without a build for CPU, and vLLM, which is there already under the name of its build for CPU."""

TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
"""Where torch's CPU builds are, for hosts whose own index lacks them."""


@dataclass
class Outcome:
    """Of one trainer's environment."""

    trainer: str
    left_out: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    """What `pip check` says of the trainer and of ours."""
    problems: list[str] = field(default_factory=list)
    """Lines of `specrollout doctor`; none: it is green."""


def pin(name: str) -> str:
    """The version that tests use."""
    for file in ("dev.txt", "trainers.txt"):
        for line in ROOT.joinpath("requirements", file).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}=="):
                return line.split()[0]  # its hashes follow
    raise ValueError(f"no requirements file pins {name}")


def required(wheel: Path) -> list[str]:
    """What a wheel asks for without extras; markers are left to pip."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line]


def run(*command: str | Path, check: bool = True) -> str:
    """What it wrote; pip's own output is shown only where it failed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], env=environment, cwd=tempfile.gettempdir(), capture_output=True, text=True
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path) -> Path:
    """Our wheel."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    return next(folder.glob("vllm_specrollout-*.whl"))


def examine(name: str, ours: Path, folder: Path) -> Outcome:
    """Make the environment and ask doctor."""
    outcome = Outcome(pin(name))
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # as `make setup` does
    fetch = (*install, "--no-deps", "--require-hashes", "--only-binary", ":all:")
    run(*fetch, "-r", ROOT / "requirements" / "cpu.txt")
    torch = ("-r", ROOT / "requirements" / "torch.txt")
    try:
        run(*fetch, *torch)
    except SystemExit:
        run(*fetch, "--index-url", TORCH_INDEX, *torch)
    run(*install, "--no-deps", "--no-build-isolation", ROOT / "requirements" / "vllm_alias")
    held = folder / "held.txt"
    held.write_text("".join(f"{line}\n" for line in run(python, "-m", "pip", "freeze").splitlines() if "+cpu" in line))
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, outcome.trainer)
    (trainer,) = folder.glob(f"{name}-*.whl")
    asked = required(trainer)
    outcome.left_out = [one for one in asked if CUDA_ONLY.match(one)]
    run(*install, "-c", held, *(one for one in asked if one not in outcome.left_out))
    run(*install, "--no-deps", trainer)
    run(*install, "-c", held, ours)
    checked = run(python, "-m", "pip", "check", check=False).splitlines()
    outcome.conflicts = [line for line in checked if line.startswith((f"{name} ", "vllm-specrollout "))]
    report = json.loads(run(folder / "bin" / "specrollout", "doctor", "--json", check=False))
    outcome.problems = [f"{one['name']}: {one['value']}" for one in report["findings"] if one["is_problem"]]
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainers", nargs="*", choices=[[], *TRAINERS])
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are, and say where")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="specrollout-fresh-"))
    failed = False
    try:
        ours = build(scratch)
        for name in given.trainers or TRAINERS:
            outcome = examine(name, ours, scratch / name)
            print(f"{outcome.trainer}: {'; '.join(outcome.problems) or 'spec rollout works here'}")
            for word, lines in (("left out", outcome.left_out), ("pip check", outcome.conflicts)):
                for line in lines:
                    print(f"    {word}: {line}")
            failed |= bool(outcome.problems)
            if given.keep:
                print(f"    in {scratch / name}")
            else:
                shutil.rmtree(scratch / name)
    finally:
        if not given.keep:
            shutil.rmtree(scratch)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
