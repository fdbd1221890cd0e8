"""Benchmarks: ratios between two ways of doing the same, taken in one run; `make bench` prints a table."""
