"""Functions of matrices (inverses, factorizations, determinants), of which only batch dims are split."""

from collections.abc import Mapping
from math import prod

from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Role, Rule, Saved
from passes.rules.parts import broadcast, factors, named, one, rule_for

# By operator, the multiplications of a function of a matrix with n rows, over n^3: orders of magnitude from Golub and
# Van Loan, "Matrix Computations", chapters 3 to 9.
MATRIX_FUNCTIONS: Mapping[str, float] = {
    "linalg_inv": 2.0,
    "inverse": 2.0,
    "linalg_cholesky": 1 / 3,
    "cholesky": 1 / 3,
    "linalg_det": 2 / 3,
    "det": 2 / 3,
    "linalg_slogdet": 2 / 3,
    "slogdet": 2 / 3,
    "logdet": 2 / 3,
    "linalg_qr": 4 / 3,
    "linalg_eigh": 9.0,
    "linalg_eigvalsh": 4 / 3,
    "linalg_svd": 21.0,
    "linalg_svdvals": 4 / 3,
    "linalg_pinv": 21.0,
    "linalg_matrix_exp": 14.0,
    "matrix_exp": 14.0,
}


@rule_for(*MATRIX_FUNCTIONS)
def of_matrices(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch rows columns, tolerances -> batch …: the matrix, and what is made of it, stay whole."""
    shape = types[op.operands[0]].shape
    batch, roles = shape[:-2], dict[str, Role]()

    def dims(name: str, prefix: str) -> Dims:
        own = types[name].shape[len(batch) :]
        roles.update((f"{prefix}{dim}", Role.WHOLE) for dim in range(len(own)))
        return (*named(batch), *named(own, prefix))

    operand = dims(op.operands[0], "matrix")
    tolerances = (broadcast(types[name].shape, batch) for name in op.operands[1:])
    operands = (operand, *tolerances)
    results = tuple(dims(name, f"result{number}_") for number, name in enumerate(op.results))
    return Rule(
        factors(*operands, *results, roles=roles),
        operands,
        results,
        multiplications=MATRIX_FUNCTIONS[op.kind] * types[op.operands[0]].size * min(shape[-2:]),
        backward=(2.0, *(0.0 for _ in operands[1:])),
        saved=(Saved(0), *(Saved(number, result=True) for number in range(len(results)))),
    )


@rule_for("linalg_solve")
def solve(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """As `_solved`. Right sides are vectors where they have one dim, or the shape of the matrices less one dim."""
    left, right = (types[name].shape for name in op.operands)
    result = types[op.results[0]].shape
    multiplications = 2 / 3 * types[op.operands[0]].size * left[-1] + 2.0 * prod(result) * left[-1]
    return _solved(op, types, multiplications, (1.0, 1.0), vectors=len(right) == 1 or right == left[:-1])


@rule_for("linalg_solve_triangular")
def triangular(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """As `linalg_solve`."""
    result, left = types[op.results[0]].shape, types[op.operands[0]].shape
    return _solved(op, types, float(prod(result) * left[-1]), (2.0, 1.0))


def _solved(
    op: Op,
    types: Mapping[str, TensorType],
    multiplications: float,
    backward: tuple[float, float],
    *,
    vectors: bool = False,
) -> Rule:
    """batch rows columns, batch rows out -> batch rows out, batch dims broadcast, or without out for `vectors`; the
    matrix, and what it is solved for, stay whole."""
    left, right = (types[name].shape for name in op.operands)
    inner, at_left = 1 if vectors else 2, bool(op.arguments["left"])
    batch, rows = types[op.results[0]].shape[:-inner], one("rows", left[-1])
    solved: Dims = (rows,)
    if not vectors:
        out = one("out", right[-1 if at_left else -2])
        solved = (rows, out) if at_left else (out, rows)
    matrix: Dims = (*broadcast(left[:-2], batch), rows, one("columns", left[-1]))
    operands: tuple[Dims, ...] = (matrix, (*broadcast(right[:-inner], batch), *solved))
    made: Dims = (*named(batch), *solved)
    return Rule(
        factors(*operands, made, roles={"rows": Role.WHOLE, "columns": Role.WHOLE}),
        operands,
        (made,),
        linear=(frozenset({1}),),
        multiplications=multiplications,
        backward=backward,
        saved=(Saved(0), Saved(0, result=True, needed_by=(0,))),
    )
