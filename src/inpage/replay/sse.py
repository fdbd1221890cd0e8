"""Server-sent events, as far as OpenAI-compatible servers use them: bytes in, the events' data out."""

from __future__ import annotations


class EventParser:
    """Cuts a byte stream into events, wherever the network happened to split it.

    Lines end in LF, CR LF or CR; comments and fields other than `data` are dropped, as they carry nothing
    here. `feed` and `close` change the parser and return the data of the events that are complete.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes (any number) and return the events they complete."""
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        if not chunk:
            return []
        self._skip_lf = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = lines.pop() if not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            events += self._take(line.rstrip(b"\r\n"))
        return events

    def close(self) -> list[str]:
        """Return what the end of the stream completes: some servers leave out the last blank line."""
        last, self._rest = self._rest, b""
        return (self._take(last) if last else []) + self._take(b"")

    def _take(self, line: bytes) -> list[str]:
        if not line:
            event, self._data = b"\n".join(self._data), []
            return [event.decode("utf-8", errors="replace")] if event else []
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        return []
