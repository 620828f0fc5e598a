"""The cost of the loop's steps in a simulated fleet."""
