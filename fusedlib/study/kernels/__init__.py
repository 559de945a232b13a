"""Study 03 from rows to paper."""

from fusedlib.study import style

# Inductor's colour with the next dash: the same rival at another setting.
style.register("inductor-max", first=9)
style.register("torch.mm", first=6)
