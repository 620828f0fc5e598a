"""Pure functions from arrays to arrays: images, sound and text; what they draw is passed in."""
