"""When a failed request to a model API is tried again."""

import math
from collections.abc import Callable

from msgspec import Struct

from providers.errors import BadPayload, ProviderError, UnclassifiedRejection


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How often and how patiently. Plain data; the waiting is the caller's, so that a cancel ends it.

    `max_attempts` counts the first one. The pause before attempt n + 1 is drawn from the upper half of
    `base_s` * 2^(n - 1), at most `cap_s`. What an API asks us to wait is a lower bound up to
    `longest_retry_after_s`; beyond that a worker would be held for too long, so the request has failed.
    """

    max_attempts: int = 4
    base_s: float = 1.0
    cap_s: float = 30.0
    longest_retry_after_s: float = 60.0
    max_doubtful_attempts: int = (
        2  # an answer that is no answer, or a refusal without a reason, seldom passes
    )

    def delay_s(self, error: ProviderError, attempt: int, random: Callable[[], float]) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed with `error`; None: give up.

        `random` gives numbers from 0 to below 1. A `retry_after_s` that is no positive number counts as none.
        """
        is_doubtful = isinstance(error, BadPayload | UnclassifiedRejection)
        most = self.max_doubtful_attempts if is_doubtful else self.max_attempts
        if error.may_retry_at_once and attempt < self.max_attempts:
            return 0.0
        if not error.is_retryable or attempt >= min(most, self.max_attempts):
            return None
        backoff_s = min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 60))
        asked_s = error.retry_after_s
        if asked_s is None or not asked_s > 0:
            return backoff_s * (0.5 + 0.5 * random())
        if asked_s > self.longest_retry_after_s or math.isinf(asked_s):
            return None
        # Above what was asked, never below: many runs are refused at once and must not come back at once.
        return asked_s + min(backoff_s, asked_s) * 0.5 * random()
