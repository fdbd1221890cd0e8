"""One-token prompts: they run as a decode from an empty state, so whatever the slot or block held must be gone.

They can never hit; what is judged is that one token gets one answer, whoever ran before. Every request is sent
alone: a product of one row and one of many take different kernels, so beside other requests the last bits of such a
prompt may differ without any state being wrong.
"""

from __future__ import annotations

from inpage.gates.bench import Bench, Judge
from inpage.gates.result import GateResult

TOKENS, REPEATS = 4, 6


def gate(bench: Bench) -> GateResult:
    """The gate: four one-token prompts, six times each with another prompt before."""
    judge = Judge(bench)
    most = 1
    for index in bench.cases(TOKENS):
        rng = bench.random(index)
        token = bench.tokens(rng, 1)
        answers = []
        for _ in range(REPEATS):
            bench.unrelated(rng, rng.randrange(2, 2 * bench.block))
            answers.append(bench.cold(token))
        judge.compared += REPEATS
        judge.equal += sum(answer.same_as(answers[0]) for answer in answers)
        distinct = len({(answer.tokens, answer.logprobs) for answer in answers})
        most = max(most, distinct)
        drift = max(answer.drift(answers[0]) for answer in answers)
        judge.worst_drift = max(judge.worst_drift, drift)
        if not all(answer.finite for answer in answers):
            judge.fail(index, "log probabilities that are not numbers")
        elif distinct > 1:
            judge.fail(
                index,
                f"the prompt {list(token)} got {distinct} answers in {REPEATS} runs, logprobs off by up to "
                f"{drift:.3g}: it read what the last owner of its state left",
            )
    judge.figures["answers to one prompt"] = most
    return judge.result(
        f"{judge.equal} of {judge.compared} equal to the first of their token, at most {most} answers to one prompt"
    )
