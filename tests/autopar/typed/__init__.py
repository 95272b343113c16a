"""Generated modules under the type checker of `spmd_types`, an opinion on layouts that does not come from us.

Its types are our placements (R, I, P; V, with a `PartitionSpec` that says which dim an axis splits, for S), and it
follows them through torch functions by itself: by rules of its own for R, I and P, by those of DTensor for splits. Here
is what it needs to read generated code:

- `collectives`: ours, each as the one of `spmd_types` of the same name, `src` and `dst`;
- `operators`: typing rules for operators that it has none for (or, as for `linear`, none that lets pending sums
  through), written with `spmd_types.rules`;
- `forms`: typing rules for our local forms;
- `running`: `run_typed`, which puts these in the place of the names that a generated module imports, annotates inputs
  and parameters with the layouts of the plan, and runs it.

Splits that a `PartitionSpec` cannot say are those in the middle of a dim: of fused projections, or an axis that is
left when a more significant one was gathered. A tensor with such a split is V on that axis without a dim, its placement
is noted beside it (`noted`), and what is computed from it is checked for R, I, P and V alone; which dim is split in the
result is then taken from the comment of the generated line. `Report` counts both kinds of lines.
"""

from tests.autopar.typed.layouts import SpmdTypeError
from tests.autopar.typed.operators import Call, Typed
from tests.autopar.typed.running import Report, run_typed

__all__ = ["Call", "Report", "SpmdTypeError", "Typed", "run_typed"]
