"""Lagrangian relaxation: multipliers on bytes and on exposed traffic, found by cutting planes."""
