"""Data that passes exchange: programs, layouts, redistributions, configurations, plans, lowered programs, errors."""
