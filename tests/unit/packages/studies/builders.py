import numpy as np
from vllm_specrollout.bench.studies.answers import Workload
from vllm_specrollout.bench.studies.formulas import StepLine

VERIFIER = StepLine(base=13.0, request=0.06, steep=0.044, knee=256.0)
DRAFTER = StepLine(base=2.03, request=0.014)


def mixed(lengths, *rows):
    """A workload with one row of acceptances per method, the same for all requests where it is a number."""
    acceptance = np.stack([np.broadcast_to(np.asarray(row, dtype=float), len(lengths)) for row in rows])
    return Workload(length=np.asarray(lengths, dtype=np.int64), acceptance=acceptance)
