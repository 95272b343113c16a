"""Pipeline stages of a distributed module: the ranks that run them, and the schedule of a step."""
