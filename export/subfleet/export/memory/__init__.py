"""The memory that a program takes on a device, planned to within a few percent before it is sent."""
