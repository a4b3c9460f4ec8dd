"""Check that the Hugging Face Hub can be reached.

The hub's libraries repeat each request for up to six minutes. A mistyped path looks like a name on
the hub, so without a network a run would take that long to report it.
"""

from __future__ import annotations

from huggingface_hub import constants, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import http_backoff

TIMEOUT = 5.0
"""Time limit of a request, in seconds."""


def check_reachable(name: str, file: str, repo_type: str = "model") -> None:
    """Check that a name is in the cache of the hub, or that the hub answers.

    Any answer is accepted, since the libraries report a missing or private repository themselves.
    Without an answer, the request is repeated once.

    Args:
        file: the file that the libraries read first.

    Raises:
        ConnectionError: the hub does not answer.
    """
    if is_offline_mode():  # the libraries fail at once
        return
    try:
        is_cached = try_to_load_from_cache(name, file, repo_type=repo_type) is not None
    except HFValidationError:  # not a valid name on the hub
        return
    if is_cached:
        return
    url = hf_hub_url(name, file, repo_type=repo_type)
    try:
        http_backoff("HEAD", url, max_retries=1, retry_on_status_codes=(), timeout=TIMEOUT)
    except Exception as error:  # from httpx or httpx2, depending on the version of huggingface_hub
        raise ConnectionError(
            f"{constants.ENDPOINT} does not answer ({type(error).__name__}: {error}). Give a path "
            "that exists, or connect to the hub; HF_HUB_OFFLINE=1 uses its cache alone"
        ) from error
