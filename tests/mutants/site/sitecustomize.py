"""For every process of a mutant's tests: `tests/mutants/run.py` puts this folder on their path."""

import mutated

mutated.install()
