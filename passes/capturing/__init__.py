"""What capture is made of: how a module stands while it is traced, the trace, and how it is written down."""
