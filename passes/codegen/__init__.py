"""emit: a pipeline stage in, Python source out. One class per region, one for the whole.

The source reads like hand-written code: values are named after the modules that compute them, comments give the module
of each group of statements and the layouts of values, and collectives are explicit calls.
"""

from passes.codegen.module import ModuleWriter, Naming
from passes.ir.lowered import Stage, Variables
from passes.ir.mesh import Mesh

__all__ = ["Naming", "emit"]


def emit(stage: Stage, variables: Variables, mesh: Mesh, naming: Naming) -> str:
    """The source of a module that defines `naming.class_name`, whose forward takes the local inputs by name and
    returns the leaves of the output; tensors received from and sent to other stages come before these. `variables` are
    those of `stage`."""
    return ModuleWriter(stage, variables, mesh, naming).source()
