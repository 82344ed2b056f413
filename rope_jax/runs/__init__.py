"""A run: its folder, its model, from the first step to the last evaluation."""
