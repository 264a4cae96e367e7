"""Draft trees: batches of them, how they are built, KV moves, and the tape of a request's noise."""
