"""How a tensor-train weight lives in a module: its class, its state dict, its optimizer state, its owners."""
