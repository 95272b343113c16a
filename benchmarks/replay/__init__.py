"""Published training runs, predicted by the planner's cost model and compared with their measurements."""
