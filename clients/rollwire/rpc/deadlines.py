"""One table: the default deadline of every method, in seconds. A server rejects a call that has none.

Streams that live as long as the two programs are the exception: keepalive ends them when the peer is gone, and every
call inside them has a deadline of its own.
"""

from __future__ import annotations

from typing import Final

_E: Final = "/rollwire.v1.EnvironmentService/"
_R: Final = "/rollwire.v1.RolloutService/"
_L: Final = "/rollwire.v1.LearnerService/"
_W: Final = "/rollwire.v1.WeightsService/"
_C: Final = "/rollwire.v1.CoordinatorService/"

DEADLINES_S: Final[dict[str, float]] = {
    f"{_E}ListEnvironments": 10.0,
    f"{_E}OpenSession": 60.0,
    f"{_E}Step": 60.0,
    f"{_E}RenewSession": 10.0,
    f"{_E}Render": 30.0,
    f"{_E}CloseSession": 10.0,
    f"{_R}GetInfo": 10.0,
    f"{_R}RunGroup": 3600.0,
    f"{_R}Generate": 600.0,
    f"{_R}UpdateWeights": 600.0,
    f"{_R}CheckWeights": 600.0,
    f"{_R}Pause": 60.0,
    f"{_R}Resume": 10.0,
    f"{_R}Sleep": 120.0,
    f"{_R}Wake": 120.0,
    f"{_R}OpenPolicySession": 30.0,
    f"{_R}ClosePolicySession": 60.0,
    f"{_R}ListPolicySessions": 10.0,
    f"{_L}GetInfo": 10.0,
    f"{_L}Train": 3600.0,
    f"{_L}Score": 3600.0,
    f"{_L}Export": 600.0,
    f"{_L}SaveCheckpoint": 1800.0,
    f"{_L}LoadCheckpoint": 1800.0,
    f"{_L}Sleep": 120.0,
    f"{_L}Wake": 120.0,
    f"{_W}FetchWeights": 600.0,
    f"{_C}GetStatus": 10.0,
    f"{_C}Stop": 10.0,
    f"{_C}OpenAgentSession": 60.0,
    f"{_C}CloseAgentSession": 60.0,
    f"{_C}GetSubmissionTerms": 30.0,
    f"{_C}SubmitTrajectories": 3600.0,
}

WITHOUT_DEADLINE: Final = frozenset({f"{_E}Play", f"{_E}Attach"})
"""Methods whose streams need no deadline."""


def deadline_s(method: str) -> float:
    """Returns the default deadline of a method.

    Args:
        method: Full name as gRPC gives it, such as `/rollwire.v1.RolloutService/GetInfo`.

    Raises:
        KeyError: The method is not in the table.
    """
    return DEADLINES_S[method]
