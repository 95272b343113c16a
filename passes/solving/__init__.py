"""The rooms of the solver, one for each method; docs/solver.md says what each proves."""
