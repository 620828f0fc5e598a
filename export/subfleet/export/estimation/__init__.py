"""What a submodel's training program would take of a device's memory, from programs that were planned before."""
