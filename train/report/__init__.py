"""What every program reports with: figures, Markdown, machine, timing, operations."""
