"""Tools that make the tables and pictures of the documentation from results."""
