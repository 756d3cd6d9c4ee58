"""Studies: drift of embeddings, ablation, ReLU-fication, with what only they use. Nothing else imports them."""
