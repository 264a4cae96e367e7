"""Budgets: how much is drafted, and what of it is verified. Pure: numbers in, plans out."""
