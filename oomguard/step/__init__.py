"""What one call of a user's step is: its inputs, its state, its pieces."""
