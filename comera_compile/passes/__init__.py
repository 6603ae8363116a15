"""How a traced graph is rewritten: one pass a file."""
