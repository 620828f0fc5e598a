"""Pure functions from arrays to arrays for images, sound and text; random numbers are passed in."""
