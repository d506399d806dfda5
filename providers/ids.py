"""Public ids: a prefix and a UUIDv7, as in `sess_0192f3c1a2b47c3d8e4f5a6b7c8d9e0f`."""

import os
import time
from typing import Literal

Prefix = Literal["agent", "sess", "run", "evt", "msg", "file", "key", "ten", "work", "mem", "batch"]


def new_id(prefix: Prefix) -> str:
    """A fresh id. Ids sort by the millisecond they were made in, but they are names, not an order."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7 (RFC 9562, section 5.7)
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return f"{prefix}_{value:032x}"


def is_id(prefix: Prefix, text: str) -> bool:
    """True for `<prefix>_` and 32 lower-case hex digits, and for nothing else."""
    head, separator, digits = text.partition("_")
    return (
        head == prefix
        and separator == "_"
        and len(digits) == 32
        and all(character in "0123456789abcdef" for character in digits)
    )
