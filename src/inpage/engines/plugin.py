"""vLLM's entry points. Without the switch both return at once and vLLM is left exactly as it was."""

from __future__ import annotations

import importlib.metadata

from inpage.engines.activation import decode_pad_wanted, on_gaudi, wanted


def platform() -> str | None:
    """`vllm.platform_plugins`: the CPU platform with in-page, or None to leave the choice to vLLM.

    Never answers beside another platform plugin (Gaudi's): vLLM accepts one. Raises nothing, because vLLM
    swallows what a platform plugin raises; bad values are refused in `register`.
    """
    from vllm.platforms import cpu_platform_plugin

    others = [e for e in importlib.metadata.entry_points(group="vllm.platform_plugins") if e.name != "inpage"]
    if not wanted() or others or cpu_platform_plugin() is None:
        return None
    return "inpage.engines.cpu_platform.InPageCpuPlatform"


def register() -> None:
    """`vllm.general_plugins`: runs in every vLLM process; hooks the scheduler where in-page is asked for.

    On Gaudi it also has the platform choose the worker, in-page's or the one that only pads decodes rightly. There
    the sources are checked with the configuration, because the switch alone does not ask for in-page.
    """
    in_page = wanted()
    if in_page:
        if not on_gaudi():
            from inpage.engines import contract

            contract.verify("vllm", contract.SCHEDULER)
        from inpage.engines import metrics, retention, scheduler

        retention.retention_wanted()  # refuses a value that is none before anything starts
        scheduler.install()
        metrics.install()
    if on_gaudi() and (in_page or decode_pad_wanted()):
        from inpage.engines import gaudi_platform

        gaudi_platform.install(in_page=in_page, decode_pad=decode_pad_wanted())


def register_decode_pad() -> None:
    """`vllm.general_plugins` of the fix `hybrid-decode-pad`: being installed is being asked for."""
    if on_gaudi():
        from inpage.engines import gaudi_platform

        gaudi_platform.install(decode_pad=True)
