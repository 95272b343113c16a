"""Calls of a distributed module: check its inputs, choose the program, run a step, return its outputs."""
