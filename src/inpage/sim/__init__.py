"""The simulator: vLLM's real scheduler and KV manager, symbolic states, and an oracle beside every step.

`knobs` says what is varied, `engine` builds the real scheduler, `folds` is the arithmetic of a symbolic
state, `store` the slots and pages, `worker` executes steps with the real mover, `oracle` compares, `world`
puts them together and `workload` keeps them busy. `run` is one seed and `campaign` many, `mutants` breaks
the rules one at a time. `traces`, `study` and `costs` replay recorded sessions to answer capacity questions.
Only `engine` touches vLLM at import time.
"""
