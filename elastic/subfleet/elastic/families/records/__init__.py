"""The settings of each family, a frozen record of its own, which are read and checked without PyTorch."""
