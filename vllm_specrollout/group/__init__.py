"""Several engines on one host, each in a process of its own, that share a batch: see docs/concepts/ladder.md."""
