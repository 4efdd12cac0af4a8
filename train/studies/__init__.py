"""Studies: synthetic tasks, many seeds in one program, intervals."""
