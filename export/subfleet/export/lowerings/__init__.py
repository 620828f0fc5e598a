"""Our own decompositions: small functions from one PyTorch operator to simpler ones, in tables by operator."""
