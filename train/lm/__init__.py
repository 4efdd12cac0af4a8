"""Training a language model: loss, optimizer, loop, evaluation, what is kept."""
