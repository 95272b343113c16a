"""Models and losses as users give them: fingerprints, Hugging Face specifics, callables, loss functions."""
