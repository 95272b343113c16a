"""Pareto frontiers: the exact optimum within limits by multi-objective dynamic programming."""
