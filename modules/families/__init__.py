"""What Hugging Face calls things, a file per model family: configs and tensor names. No other code names a family."""
