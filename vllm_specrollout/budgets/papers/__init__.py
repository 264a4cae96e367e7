"""Budgets of the published systems, as their papers mean them, for comparison on one engine and on one trace."""
