"""Models on disk: converted folders written and read, Hugging Face folders and GGUF files read, tokenizers checked."""
