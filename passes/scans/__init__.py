"""Scans over a sequence as operators: a trace of their loops has an op for each step of each place or chunk.

`delta` is linear attention by the delta rule, chunk after chunk; `selective` the selective state spaces of Mamba.
"""
