"""In a process of its own each: whichever is imported first, and even if we are never imported."""

import os
import subprocess
import sys

import pytest

from tests import warm

IMPORTS = {
    "we come before vLLM": "import vllm_specrollout; from vllm import LLM, EngineArgs",
    "we come after vLLM": "from vllm import LLM, EngineArgs; import vllm_specrollout",
    "nobody imports us": "from vllm import LLM, EngineArgs",
}
MAKE = """
import sys
{imports}
model, given = {model!r}, {{"max_draft_tokens": 8}}
kwargs = {{"spec_rollout": given}} if {has_keyword} else {{"additional_config": {{"spec_rollout": given}}}}
config = EngineArgs(model, skip_tokenizer_init=True, **kwargs).create_engine_config()
print(config.parallel_config.worker_cls, config.additional_config["spec_rollout"]["max_draft_tokens"])
"""


@pytest.mark.parametrize(
    "imports",
    # the first one imports vLLM anew
    [
        pytest.param(code, id=name, marks=[pytest.mark.nightly] if name == "we come before vLLM" else [])
        for name, code in IMPORTS.items()
    ],
)
def test_it_is_switched_on_whatever_is_imported_first(model, imports):
    code = MAKE.format(imports=imports, model=model, has_keyword="vllm_specrollout" in imports)
    if imports.startswith("from vllm "):
        # what it does first is done already
        done = warm.run(["-c", code], os.environ)
    else:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["vllm_specrollout.worker.v1.worker.SpecRolloutCPUWorker 8"], done.stderr
