"""What one try at a case gives."""

from fusedlib.bench.attempt import Attempt


def outcome(measure, case):
    """Figures, status and reason, as a sweep's row has them."""
    tried = Attempt.at(measure, case)
    return {**tried.figures, **(tried.value or {})}, tried.status, tried.reason
