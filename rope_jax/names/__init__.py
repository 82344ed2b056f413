"""Names and options: registries of what has a name, and values of options by their annotations."""
