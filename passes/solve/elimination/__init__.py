"""Variable elimination, and bucket elimination of what remains."""
