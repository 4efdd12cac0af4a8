"""The contract of all mechanisms: a row for each, its properties and its costs."""
