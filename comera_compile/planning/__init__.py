"""What contractions a tensor-train weight needs, what they cost, and which to do."""
