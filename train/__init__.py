"""Everything that runs: each program is a thin main over one function."""
