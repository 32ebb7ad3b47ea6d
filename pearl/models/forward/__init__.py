"""Our own forward pass: layers, products, attention, the cache; on a CPU in any size, on a GPU in fixed sizes."""
