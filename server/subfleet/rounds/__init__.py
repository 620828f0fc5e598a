"""The run as a pure state machine: no input or output, no PyTorch, no database."""
