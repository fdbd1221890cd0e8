"""A long run against one real server: aborts, preemptions and cache resets, and whether anything is lost or wrong."""
