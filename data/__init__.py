"""Text in, activations out: corpora, prompt files with their answers, the activation store (code only)."""
