"""What the loop's steps cost, in a simulated fleet."""
