"""Our own forward pass: decoder layers of the known families, and the runner around them."""
