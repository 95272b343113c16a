"""Tests of the strategies pass."""
