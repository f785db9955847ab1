r"""Output that is bounded: the first and the last bytes of a stream are kept, the rest is counted, no character is cut.

Example:
    >>> output = BoundedOutput(6)
    >>> output.add(b"abcdefghij")
    >>> output.text()
    ('abc\n[4 bytes left out]\nhij', 4)
"""


class BoundedOutput:
    """Takes any number of bytes, keeps at most `limit`, half of them from the end."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take in more bytes."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:
            self._trim()

    def _trim(self) -> None:
        del self._tail[: max(len(self._tail) - self._tail_limit, 0)]

    def text(self) -> tuple[str, int]:
        """(what is kept, number of bytes left out). The text says where and how much."""
        self._trim()
        return join_cut(bytes(self._head), bytes(self._tail), self.total - len(self._head) - len(self._tail))


def join_cut(head: bytes, tail: bytes, left_out: int) -> tuple[str, int]:
    """Text of two parts between which `left_out` bytes are missing; a character that the cut broke is left out too."""
    if not left_out:
        return decode(head + tail), 0
    whole_head, whole_tail = drop_partial_end(head), drop_partial_start(tail)
    left_out += len(head) + len(tail) - len(whole_head) - len(whole_tail)
    return f"{decode(whole_head)}\n[{left_out} bytes left out]\n{decode(whole_tail)}", left_out


def decode(data: bytes) -> str:
    """Text of any bytes; what is no UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", "replace")


def drop_partial_end(data: bytes) -> bytes:
    """Without the first bytes of a character whose last bytes are missing."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        size = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return data[:-back] if size > back else data
    return data


def drop_partial_start(data: bytes) -> bytes:
    """Without the last bytes of a character whose first bytes are missing."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
