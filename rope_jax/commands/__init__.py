"""The commands: their arguments, what they print, and how they end."""
