"""The only code that knows vLLM: turns its objects into plain facts, and `state`'s moves into hooks.

| module         | runs in                              | what it does                                              |
|----------------|--------------------------------------|-----------------------------------------------------------|
| `plugin`       | every vLLM process                   | entry points; does nothing unless asked                   |
| `activation`   | front end, EngineCore, workers       | is in-page wanted here, and is the configuration covered  |
| `contract`     | every vLLM process                   | is the installed engine the one this was written against  |
| `scheduler`    | EngineCore                           | the chunk grid, and rule 4                                |
| `cpu_platform` | front end                            | refuses what is not covered, chooses the in-page worker   |
| `cpu`          | workers                              | slots, pages and hooks on vLLM's CPU runner               |
"""
