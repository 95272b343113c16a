"""The library that generated code imports: collectives, local forms, saved tensors, base classes."""
