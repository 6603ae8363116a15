"""How a planned contraction runs."""
