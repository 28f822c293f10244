"""What the device says: memory, errors, allocations."""
