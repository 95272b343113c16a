"""Programs with symbolic sizes: specialize them for the sizes of a call, or derive them from samples."""
