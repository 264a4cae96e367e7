"""The one runner of all scenarios: flags from a dataclass, engines, rounds, comparison, report."""
