"""Agent sessions fixed by a seed: the same bytes for every arm, whatever a server answers.

A session is a conversation that grows. Turn 1 is the shared system prompt, the shared tools and a task;
every later turn adds an assistant message and the text that came back to it, and sends the whole again.
The assistant messages are seeded text too, never what the server generated: a generated token and the
same token prefilled write different bits, and the arms would drift apart.

What comes back to the assistant is a user message. Agents also send messages of role `tool`, but some
chat templates refuse those whose call ids they did not mint; a strict alternation is accepted everywhere
and costs the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from inpage.errors import ConfigError

Message = dict[str, str]
Tool = dict[str, Any]
Count = Callable[[list[Message], list[Tool]], Awaitable[int]]
"""Prompt tokens of messages and tools, as the server counts them."""

# Words of one length, so that a text of n words has the same number of bytes whatever the seed.
_LIST = (
    "about above actor adapt admin after again agent agree alarm album alert alias align allow alpha "
    "along angle apply arena array aside asset audio audit avoid award aware badge basic batch began "
    "begin below bench birth black blank block board brain brand break brief bring broad brown build "
    "cabin cable cache carry cause chain chair chart check chief child civil claim class clean clear "
    "click clock close cloud coach coast count court cover craft cross crowd cycle daily dance delay "
    "depth doubt draft drama dream drive early earth eight empty enemy enjoy enter entry equal error "
    "event every exact exist extra faith false fault fiber field fifth fight final first flash fleet "
    "floor focus force frame fresh front fruit giant given glass globe grade grand grant graph green "
)
WORDS = tuple(_LIST.split())


def _tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_READ = "Return the text of one file."
_OTHERS = [
    _tool("write_file", "Replace the text of one file.", path="Path of the file.", text="The new text."),
    _tool("run_command", "Run a shell command and return its output.", command="The command line."),
    _tool("search", "Find lines that match a pattern.", pattern="A regular expression.", path="Folder."),
    _tool("list_files", "List the files below a folder.", path="Path of the folder."),
]
TOOLS: list[Tool] = [_tool("read_file", _READ, path="Path of the file."), *_OTHERS]
# For requests outside the measurement: as long as TOOLS but different from the first name on, because
# most templates render the tools first and a prefix cache would otherwise be warm before turn 1.
DECOY_TOOLS: list[Tool] = [_tool("load_file", _READ, path="Path of the file."), *_OTHERS]


def words(key: str, n: int) -> str:
    """Return `n` words that depend on `key` alone, joined by spaces.

    They are dealt from shuffled decks of the whole list, so texts of equal length also cost nearly equal
    numbers of tokens under any tokenizer.
    """
    rng, dealt = random.Random(key), list[str]()
    while len(dealt) < n:
        deck = list(WORDS)
        rng.shuffle(deck)
        dealt += deck
    return " ".join(dealt[:n])


@dataclass(frozen=True)
class SessionSpec:
    """What to replay; all sizes are in tokens of the served model.

    `start_tokens` is the prompt of turn 1, `new_tokens` is what each later turn adds (assistant message,
    the text that comes back, and the template around both), and turns go on while the prompt is at most
    `end_tokens`. `output_tokens` are generated each turn. `system_tokens` is the part that all sessions
    share: system prompt and tools with their template.

    Raises `ConfigError` when the sizes do not make a session.
    """

    sessions: int
    start_tokens: int
    end_tokens: int
    new_tokens: int
    output_tokens: int
    system_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        start, end, new, output = self.start_tokens, self.end_tokens, self.new_tokens, self.output_tokens
        for wrong, why in (
            (self.sessions < 1, f"--sessions is {self.sessions}: at least one session is needed"),
            (output < 1, f"--output-tokens is {output}: a turn generates at least one token"),
            (new < 1, f"--new-tokens is {new}: every turn must add tokens"),
            (self.system_tokens < 1, f"--system-tokens is {self.system_tokens}: it must be positive"),
            (
                start > end,
                f"--start-tokens ({start}) is above --end-tokens ({end}): a session grows from start to end",
            ),
            (
                self.system_tokens >= start,
                f"--system-tokens ({self.system_tokens}) must be below --start-tokens ({start}): turn 1 is the "
                "shared system prompt and a task of the session's own",
            ),
            (
                start + new <= end and new <= output,
                f"--new-tokens ({new}) must be above --output-tokens ({output}): a turn's new tokens include the "
                "assistant message that the history carries",
            ),
        ):
            if wrong:
                raise ConfigError(why)

    @property
    def turns(self) -> int:
        """Turns of one session."""
        return 1 + (self.end_tokens - self.start_tokens) // self.new_tokens

    def prompt_tokens(self, turn: int) -> int:
        """Intended prompt of a turn (from 1), in tokens."""
        return self.start_tokens + (turn - 1) * self.new_tokens


def total_turns(spec: SessionSpec) -> int:
    """Requests that a replay of `spec` sends, over all sessions."""
    return spec.sessions * spec.turns


@dataclass(frozen=True)
class Calibration:
    """What text costs on this server, in tokens: `per_word`; `fixed` for tools, the wrappers of system and
    task and the generation prompt; `per_turn` for the wrappers of an assistant and a user message.
    """

    per_word: float
    fixed: float
    per_turn: float


async def calibrate(spec: SessionSpec, count: Count) -> Calibration:
    """Measure with three prompts of other text than the transcripts'.

    The longest has a word for every 16 tokens of turn 1 (a word is at most six tokens), so it fits where
    turn 1 does. Raises `ConfigError` when the server's counts do not grow with the text.
    """
    many = min(1024, max(16, spec.start_tokens // 16))
    many -= many % len(WORDS) if many > len(WORDS) else 0

    async def measure(n: int, *more: Message) -> int:
        opening = [_message("system", words("calibration system", 1)), _message("user", words("calibration", n))]
        return await count([*opening, *more], DECOY_TOOLS)

    one = await measure(1)
    per_word = (await measure(many) - one) / (many - 1)
    if per_word <= 0:
        raise ConfigError(
            f"the server counts as many prompt tokens for {many} words as for one: it cannot be calibrated"
        )
    more = [_message("assistant", words("calibration 2", 1)), _message("user", words("calibration 3", 1))]
    turn = await measure(1, *more) - one
    return Calibration(per_word, one - 2 * per_word, turn - 2 * per_word)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@dataclass(frozen=True)
class Transcripts:
    """The messages of every session; `tools` go with every request."""

    spec: SessionSpec
    sessions: tuple[tuple[Message, ...], ...]
    tools: list[Tool]

    def messages(self, session: int, turn: int) -> list[Message]:
        """Messages of one request: session from 0, turn from 1; a strict prefix of the next turn's."""
        return list(self.sessions[session][: 2 * turn])

    @property
    def digest(self) -> str:
        """SHA-256 over everything that is sent and the tokens asked for; equal digests, equal work."""
        sent = json.dumps([self.tools, self.sessions, self.spec.output_tokens], sort_keys=True)
        return hashlib.sha256(sent.encode()).hexdigest()


def build(spec: SessionSpec, cost: Calibration, *, tools: list[Tool] = TOOLS, salt: str = "") -> Transcripts:
    """Write the transcripts; the text of a turn depends on (seed, salt, session, turn) alone.

    Raises `ConfigError` when a part is too small to hold its template and one word.
    """

    def fill(tokens: float, option: str, value: int) -> int:
        n = int(tokens / cost.per_word + 1e-6)
        if n < 1:
            least = value + math.ceil(cost.per_word - tokens - 1e-6)
            raise ConfigError(
                f"{option} ({value}) is too small on this server: tools and chat template leave no room for "
                f"a word of text; give at least {least}"
            )
        return n

    seed = f"{spec.seed}/{salt}"
    n_system = fill(spec.system_tokens - cost.fixed, "--system-tokens", spec.system_tokens)
    n_task = fill(spec.start_tokens - cost.fixed - n_system * cost.per_word, "--start-tokens", spec.start_tokens)
    n_reply = max(1, int(spec.output_tokens / cost.per_word + 1e-6))
    system = _message("system", words(f"{seed}/system", n_system))
    sessions = []
    for session in range(spec.sessions):
        written = n_system + n_task
        said = [system, _message("user", words(f"{seed}/{session}/1", n_task))]
        for turn in range(2, spec.turns + 1):
            # From the total, not from the turn before, so that rounding does not add up over the turns.
            room = spec.prompt_tokens(turn) - cost.fixed - (turn - 1) * cost.per_turn
            n_back = fill(room - (written + n_reply) * cost.per_word, "--new-tokens", spec.new_tokens)
            written += n_reply + n_back
            said.append(_message("assistant", words(f"{seed}/{session}/{turn}/reply", n_reply)))
            said.append(_message("user", words(f"{seed}/{session}/{turn}", n_back)))
        sessions.append(tuple(said))
    return Transcripts(spec, tuple(sessions), tools)
