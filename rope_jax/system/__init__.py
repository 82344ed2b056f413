"""Files, devices and processes."""
