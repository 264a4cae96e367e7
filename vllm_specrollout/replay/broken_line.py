"""Names that `decoupled` still takes from here; they are the step cost's."""

from vllm_specrollout.budgets.step_cost import Floats as Floats
from vllm_specrollout.budgets.step_cost import non_negative as non_negative
