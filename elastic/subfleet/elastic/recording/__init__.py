"""Any PyTorch module as an elastic network: one run of it is recorded as plain data."""
