"""What Hugging Face calls things, a file per model family: configs and tensor names. Nobody else knows a family."""
