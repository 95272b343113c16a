"""Consistency between ranks: process groups, comparison of calls and values, propagation of failures."""
