"""The study of what mixers recall: runs, claims, tables and pictures."""
