"""What a hybrid's pages hold, and what each layout makes of a memory budget: arithmetic, no engine.

`model` reads a `config.json`, `geometry` turns it into state, page and block, `pool` gives each layout
its blocks, tokens, sessions and slots, `advice` says what will go wrong, `command` prints it all.
Every number is for one rank: under tensor parallelism each rank has a pool of its own.
"""
