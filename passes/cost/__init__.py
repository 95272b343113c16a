"""Costs of a plan in seconds and bytes: hardware, compute, communication, steps, memory."""
