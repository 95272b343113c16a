"""Finding rules by running ops on shards: calls to run, values to run them on, and which splits hold."""
