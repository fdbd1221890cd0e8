"""Package of the double."""
