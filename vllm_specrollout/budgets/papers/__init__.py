"""How much the published systems draft, as their papers mean it, for comparison on one engine and on one trace."""
