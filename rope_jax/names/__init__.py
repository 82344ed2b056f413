"""Names and options: registries by name, and values of options by their annotations."""
