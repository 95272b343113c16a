"""Ranks before there is a distributed module: the world mesh, its devices, and agreement on a plan."""
