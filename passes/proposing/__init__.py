"""What candidates consist of: where ops stand, what they keep, what may be stored and what is demanded."""
