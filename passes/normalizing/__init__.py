"""What normalize is made of."""
