"""A method, a family and a data set for Subfleet; entry points name them."""
