"""A case in words, and whether it can run here."""

from fusedlib.bench import rivals
from measure.llama.arms import TASK
from measure.llama.models import Case


def label(case: Case) -> str:
    """A case in a few words."""
    size = f"{case['batch_size']}×{case['context_length']}"
    told = f"{case['experiment']} {case['model']} {size} {case['dtype']} {case['provider']}"
    return " ".join([told, *(f"{n} {case[n]}" for n in ("seed", "step") if n in case)])


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where the device or a package is missing."""
    rivals.get(TASK, case["provider"]).check_available(case["device"], case["dtype"])
