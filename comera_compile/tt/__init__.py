"""What a tensor-train weight is: shape, packing, decomposition, initialisation, the marker op."""
