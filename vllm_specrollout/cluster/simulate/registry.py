"""Which studies there are, and how one is run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from vllm_specrollout.cluster.simulate.inputs import load
from vllm_specrollout.cluster.simulate.report import StudyReport
from vllm_specrollout.config.checks import check_choice
from vllm_specrollout.errors import ConfigError, SpecRolloutError

STUDIES = {
    "tlt-table-4": "TLT, Table 4: the speed-up by batch size and tokens to verify.",
    "tlt-cycles": "TLT, Tables 7 and 8: throughput from the accept length and one cycle time per drafter.",
    "specactor": "SpecActor, section 5.4: what each technique adds to a rollout on 256 GPUs.",
    "one-request": "One request alone: coupled chain and comb, a drafter ahead, and enumerated exits.",
}
"""Name -> what it reproduces."""


def run_study(name: str, seed: int = 0, inputs: Path | None = None) -> StudyReport:
    """Run one study; deterministic under its seed.

    Args:
        name: one of `STUDIES`.
        inputs: a file of inputs instead of the shipped one.

    Raises:
        ConfigError: an unknown study, or inputs that cannot be used.
    """
    check_choice("STUDY", name, tuple(STUDIES))
    module = importlib.import_module(f"vllm_specrollout.cluster.simulate.studies.{name.replace('-', '_')}")
    given = load(name, inputs)
    try:
        return cast(StudyReport, module.run(given, seed))
    except SpecRolloutError:
        raise
    except (ArithmeticError, ValueError, IndexError) as error:
        # shipped values work, so this is a value of the user's that no study can use
        if inputs is None:
            raise
        cause = f"`{inputs}` cannot be simulated: {error}"
        raise ConfigError(cause, "change one value of the shipped file at a time") from error
