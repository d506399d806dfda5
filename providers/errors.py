"""What can go wrong with a model API, in our words.

ProviderError
├── RateLimited        429; may pass, honours `retry_after_s`
├── QuotaExceeded      no credit or a spend limit; does not pass by itself
├── Overloaded         the API has no capacity just now
├── ServerFailed       any other failure on the API's side
├── ConnectionLost     the connection could not be made or broke
├── RequestTimedOut    nothing arrived for too long
├── StreamTruncated    the answer ended without its terminal marker
├── BadPayload         the answer was not what the API promises (HTML, half JSON, no event)
├── ContextTooLong     the request does not fit the model's window: compact, then try again
├── AuthRefused        the key is wrong or may not do this
├── ModelNotFound      the API does not know the model
├── RequestRejected    the API refuses the request as it is
│   └── UnclassifiedRejection  a proxy says so without saying why: once more may help
└── UnknownModel       no provider of ours goes by this name (raised before any request)
"""

from typing import ClassVar


class ProviderError(Exception):
    """Base of all. `code` is stable; the message is fit for logs, and holds no secret.

    `another_model_may_help`: the failure is of a key, a server or a model rather than of the request.

    Fields: `status` (HTTP status, None in a stream), `vendor_code` (the API's own code or type),
    `retry_after_s` (seconds that the API asks us to wait, None if it did not say),
    `request_id` (the API's id of the request, for support), `may_retry_at_once` (it was about a key, and
    another one is ready).
    """

    code: ClassVar[str] = "provider_error"
    is_retryable: ClassVar[bool] = False
    another_model_may_help: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        vendor_code: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.vendor_code = vendor_code
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.may_retry_at_once = False


class RateLimited(ProviderError):
    code = "rate_limited"
    is_retryable = True


class QuotaExceeded(ProviderError):
    code = "quota_exceeded"


class Overloaded(ProviderError):
    code = "provider_overloaded"
    is_retryable = True


class ServerFailed(ProviderError):
    code = "provider_failed"
    is_retryable = True


class ConnectionLost(ProviderError):
    code = "connection_lost"
    is_retryable = True


class RequestTimedOut(ProviderError):
    code = "provider_timeout"
    is_retryable = True


class StreamTruncated(ProviderError):
    code = "stream_truncated"
    is_retryable = True


class BadPayload(ProviderError):
    code = "bad_payload"
    is_retryable = True


class ContextTooLong(ProviderError):
    code = "context_too_long"
    another_model_may_help = False


class AuthRefused(ProviderError):
    code = "provider_auth"


class ModelNotFound(ProviderError):
    code = "model_not_found"


class RequestRejected(ProviderError):
    code = "request_rejected"
    another_model_may_help = False


class UnclassifiedRejection(RequestRejected):
    code = "rejected_without_reason"
    is_retryable = True
    another_model_may_help = True


class UnknownModel(ProviderError):
    code = "unknown_model"
