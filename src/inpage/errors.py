"""The errors of inpage.

Every message says what happened, with which request, block and position, and what to do about it.
Two families matter to a caller: an error before anything has started (`ConfigError`, `ContractError`:
mend the input and start again) and an error while serving (`StateError`: the engine must stop, because
going on would serve a wrong state).
"""

from __future__ import annotations


class InPageError(Exception):
    """Base class of everything that inpage raises on purpose."""


class ConfigError(InPageError):
    """Bad input, or a configuration that inpage does not cover; raised before anything starts."""


class ContractError(InPageError):
    """The installed engine is not the one that inpage was written against; raised at start-up."""


class StateError(InPageError):
    """A wrong state would have been served (rule 5, fail closed); the engine stops."""


class ServerError(InPageError):
    """A server that inpage talks to over HTTP did not answer as it must."""
