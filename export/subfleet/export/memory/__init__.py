"""The memory that a program takes on a device, planned to within some percent before it is sent."""
