"""Settings: what they are, clear errors for keys and values, what may change between starts."""
