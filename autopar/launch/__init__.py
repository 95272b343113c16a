"""Ranks before there is a distributed module: the world mesh and its devices."""
