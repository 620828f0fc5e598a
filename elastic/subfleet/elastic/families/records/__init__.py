"""The settings of each family as a frozen record, which is read and checked without PyTorch."""
