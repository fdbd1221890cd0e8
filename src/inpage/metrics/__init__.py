"""What inpage counts, as Prometheus metrics: names, snapshots, reading them back; no engine is imported here."""
