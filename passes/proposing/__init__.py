"""What candidates consist of: how ops and tensors may be split, stored and connected, at what price."""
