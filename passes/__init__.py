"""The compiler: programs, a mesh and a cluster in, a plan and source code out. It runs no model."""
