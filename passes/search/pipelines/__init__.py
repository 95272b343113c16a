"""Pipelines: a program in the cuts, the schedule and the levels of recompute with which its step is shortest.

`search` tries ranks and numbers of micro-batches, those with the lowest bound first (`bounds`). One choice of
layouts (`program`) is cut into stages (`staging`, `cuts`) that fit (`memory`), each with a level of recompute of its
own (`levels`, `recompute`).
"""

from passes.search.pipelines.search import best_pipeline, least_pipeline_s

__all__ = ["best_pipeline", "least_pipeline_s"]
