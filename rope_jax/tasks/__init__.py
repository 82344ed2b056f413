"""Training tasks: batch fields, loss and metrics of each."""
