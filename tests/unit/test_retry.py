import pytest

from providers import errors
from providers.errors import BadPayload, Overloaded, ProviderError, QuotaExceeded, RateLimited
from providers.retry import RetryPolicy

POLICY = RetryPolicy(max_attempts=4, base_s=1.0, cap_s=3.0)
ALL = ProviderError.__subclasses__()


def least() -> float:
    return 0.0


def most() -> float:
    return 0.999_999


def test_pauses_double_up_to_the_cap_with_jitter_in_the_upper_half() -> None:
    error = Overloaded("busy")
    assert [POLICY.delay_s(error, attempt, least) for attempt in (1, 2, 3)] == [0.5, 1.0, 1.5]
    longest = [POLICY.delay_s(error, attempt, most) for attempt in (1, 2, 3)]
    assert longest == [pytest.approx(1.0), pytest.approx(2.0), pytest.approx(3.0)]


def test_the_last_attempt_is_not_followed_by_another() -> None:
    assert POLICY.delay_s(Overloaded("busy"), 4, least) is None
    assert RetryPolicy(max_attempts=1).delay_s(Overloaded("busy"), 1, least) is None


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.code)
def test_only_what_may_pass_is_tried_again(kind: type[ProviderError]) -> None:
    assert (POLICY.delay_s(kind("x"), 1, least) is not None) == kind.is_retryable


def test_what_does_not_pass_by_itself_is_never_tried_again_whatever_the_api_asks() -> None:
    assert POLICY.delay_s(QuotaExceeded("no credit", retry_after_s=1.0), 1, least) is None
    never = {"quota_exceeded", "provider_auth", "request_rejected", "context_too_long", "model_not_found"}
    assert never.isdisjoint(
        {kind.code for kind in vars(errors).values() if getattr(kind, "is_retryable", False)}
    )


@pytest.mark.parametrize("retry_after_s", [1.5, 2.0, 60.0])
def test_what_the_api_asks_to_wait_is_waited_at_least(retry_after_s: float) -> None:
    error = RateLimited("slow down", retry_after_s=retry_after_s)
    assert POLICY.delay_s(error, 1, least) == retry_after_s
    above = POLICY.delay_s(error, 1, most)
    assert above is not None
    assert retry_after_s < above <= retry_after_s * 1.5


@pytest.mark.parametrize("retry_after_s", [60.1, 2_000_000.0, float("inf")])
def test_a_wait_that_would_hold_the_worker_too_long_fails_at_once(retry_after_s: float) -> None:
    assert POLICY.delay_s(RateLimited("slow down", retry_after_s=retry_after_s), 1, least) is None


@pytest.mark.parametrize("retry_after_s", [0.0, -5.0, float("nan"), None])
def test_a_wait_that_makes_no_sense_is_ordinary_back_off(retry_after_s: float | None) -> None:
    assert POLICY.delay_s(RateLimited("slow down", retry_after_s=retry_after_s), 1, least) == 0.5


def test_an_answer_that_is_no_answer_is_tried_once_more() -> None:
    assert POLICY.delay_s(BadPayload("html"), 1, least) == 0.5
    assert POLICY.delay_s(BadPayload("html"), 2, least) is None
