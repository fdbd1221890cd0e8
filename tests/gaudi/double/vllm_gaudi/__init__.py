"""A double of vllm-gaudi for tests: the names, tensors and rules in-page relies on, around a toy model.

It stands for what `inpage.engines.contract` lists and nothing more. The real plugin is run by
`tests/gaudi/test_gaudi_plugin.py`, which shows that the double behaves like it where it matters.
"""
