"""One file per study: its docstring says command, cost and expected number."""
