"""The one write to Redis: fence, keep what late readers need, publish. Atomic."""

import hashlib
from typing import Literal

from msgspec import Struct

from app.streaming import keys

PUBLISH = """
local epoch = tonumber(ARGV[1])
if epoch then
  local seen = tonumber(redis.call('GET', KEYS[1]) or '-1')
  if epoch < seen then return -1 end
  if epoch > seen then redis.call('DEL', KEYS[2]) end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[6])
end
if ARGV[4] == 'keep' then
  redis.call('RPUSH', KEYS[2], ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
elseif ARGV[4] == 'clear' then
  redis.call('DEL', KEYS[2])
end
return redis.call('PUBLISH', ARGV[2], ARGV[3])
"""

PUBLISH_SHA = hashlib.sha1(PUBLISH.encode(), usedforsecurity=False).hexdigest()

STALE = -1
"""What the script returns when a newer epoch has published; nothing was done."""


class Publication(Struct, frozen=True, kw_only=True):
    """One call of the script.

    `previews`: `keep` appends `entry` to what late readers join from, `clear` drops all of it.
    """

    session_id: str
    epoch: int | None
    payload: bytes
    previews: Literal["keep", "clear", "leave"] = "leave"
    entry: bytes = b""

    def arguments(self) -> tuple[int | str | bytes, ...]:
        """What follows the script or its hash in EVAL and EVALSHA."""
        return (
            2,
            keys.epoch_key(self.session_id),
            keys.previews_key(self.session_id),
            "" if self.epoch is None else self.epoch,
            keys.events_channel(self.session_id),
            self.payload,
            self.previews,
            self.entry,
            keys.EPOCH_LIFETIME_MS,
            keys.PREVIEWS_LIFETIME_MS,
        )
